// The minimal pid 1 of a container (one rank and its children), its launcher stage, and two small helpers.
//
//   init --status-fd N [options] -- argv...      start argv as the rank of a fresh container
//   init --restore --status-fd N [options]       a container without a rank; CRIU will restore one into it
//   init --hold --status-fd N --overlay ...      keep a mount namespace (a job's volume) that containers join
//   init --enter PID [--net-too] [--no-aslr] -- argv...   run argv in the namespaces of container init PID (CRIU does)
//
// Options (--overlay and --bind are applied in the order given):
//   --parent PID             the launcher; if it is no longer our parent, stop at once
//   --mounts-of PID          start from the mount namespace of PID (a --hold process)
//   --overlay L U W M        overlayfs: lower L, upper U, work W, mounted on M
//   --bind S D               bind mount S on D
//   --net host|none|private  none and private: a network namespace with only loopback, up
//   --log FILE               opened for appending inside the container: the rank's stdout and stderr
//   --cwd DIR  --keep-fd N  --no-aslr  --first-pid N
//   --keeper-fd N            a descriptor that the keeper holds; may be repeated, in ascending order
//   --no-shm N,N,...         device numbers that /dev/shm must not have
//
// Lines written to the status socket: "init PID" (host pid of pid 1), "ready" (restore, hold), "running PID HOST" (of
// the rank: pid inside and host pid, the latter 0 after a restore), "exit CODE", "signal N", "error SENTENCE".
// Read from it in restore mode: "rank KEEPER RANK", pids inside.
//
// Inside are pid 1, a keeper and the rank. The keeper is the parent of the rank and of every process whose own parent
// has ended, and does nothing but wait; so all that the rank has started is one tree below it, which CRIU dumps, and
// pid 1 is not part of it. It ends as the rank ends.
//
// Life: the first stage stays in the launcher's pid namespace and waits for pid 1. Each stage is killed by the kernel
// (PR_SET_PDEATHSIG) when its parent dies, pid 1 also leaves when the status socket's other end is closed, and with
// pid 1 the kernel kills all that is inside. So no orphan survives any death.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/close_range.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kSetupFailed = 126, kLauncherGone = 125, kUsage = 2 };
enum { kMaxKeeperFds = 1024 };
enum mode { kRun, kRestore, kHold, kEnter, kKeeper };

struct options {
  enum mode mode;
  int status_fd;
  int keep_fd;
  int keeper_fds[kMaxKeeperFds];
  int keeper_fds_len;
  pid_t parent;
  pid_t mounts_of;
  pid_t enter;
  bool enter_net;
  bool new_net;
  bool no_aslr;
  long first_pid;
  const char* log;
  const char* cwd;
  const char* no_shm;
  int host_proc;  // /proc of the launcher's pid namespace: tells a process its host pid
  char** mounts;  // where --overlay and --bind stand in argv
  int mounts_len;
  char** argv;
  char** all;  // argv as it was given to main
  int report_fd;
};

static int g_status_fd = -1;

static void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char* format, ...) {
  char line[PATH_MAX + 512];
  va_list args;
  va_start(args, format);
  int n = vsnprintf(line, sizeof line - 1, format, args);
  va_end(args);
  if (n < 0) return;
  if ((size_t)n > sizeof line - 2) n = sizeof line - 2;
  for (int i = 0; i < n; i++) {
    if (line[i] == '\n') line[i] = ' ';
  }
  line[n++] = '\n';
  if (g_status_fd < 0) {
    if (write(2, line, (size_t)n) < 0) return;
  } else if (send(g_status_fd, line, (size_t)n, MSG_NOSIGNAL) < 0) {
    return;  // the launcher is gone: the kernel is about to end us
  }
}

static void fail(const char* what, const char* object) __attribute__((noreturn));
static void fail(const char* what, const char* object) {
  say("error %s %s: %s", what, object, strerror(errno));
  _exit(kSetupFailed);
}

static void usage(const char* why) __attribute__((noreturn));
static void usage(const char* why) {
  fprintf(stderr, "ergo-init: %s\n", why);
  _exit(kUsage);
}

static long number(const char* text) {
  char* end = NULL;
  errno = 0;
  long value = strtol(text, &end, 10);
  if (errno != 0 || end == text || *end != '\0' || value < 0 || value > INT_MAX) usage("not a number");
  return value;
}

// The kernel kills us when the parent dies. The parent may have died before the call: `lifeline` is a pidfd of it.
static void die_with_parent(int lifeline) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) fail("cannot ask to die with", "the launcher");
  struct pollfd gone = {.fd = lifeline, .events = POLLIN};
  if (poll(&gone, 1, 0) != 0) _exit(kLauncherGone);
}

static int open_pid(pid_t pid) {
  int fd = (int)syscall(SYS_pidfd_open, pid, 0);
  if (fd < 0) fail("cannot open", "the process to follow");
  return fd;
}

static void close_all_but(int keep) {
  unsigned first = 3;
  if (keep >= 3) {
    if (keep > 3) syscall(SYS_close_range, 3U, (unsigned)keep - 1, 0U);
    first = (unsigned)keep + 1;
  }
  syscall(SYS_close_range, first, ~0U, 0U);
}

static void escape(char* out, size_t size, const char* path) {
  size_t n = 0;
  for (; *path != '\0'; path++) {
    if (n + 3 > size) {
      errno = ENAMETOOLONG;
      fail("cannot mount", "the volume");
    }
    if (strchr("\\,:", *path) != NULL) out[n++] = '\\';
    out[n++] = *path;
  }
  out[n] = '\0';
}

static void mount_overlay(char** paths) {
  char lower[PATH_MAX], upper[PATH_MAX], work[PATH_MAX], data[3 * PATH_MAX + 128];
  escape(lower, sizeof lower, paths[0]);
  escape(upper, sizeof upper, paths[1]);
  escape(work, sizeof work, paths[2]);
  // redirect_dir: a job may rename a directory of the lower layer; index and metacopy off: the upper directory
  // can be copied elsewhere (with its trusted.overlay.* attributes) and stacked on another copy of the lower one.
  snprintf(data, sizeof data, "lowerdir=%s,upperdir=%s,workdir=%s,redirect_dir=on,index=off,metacopy=off", lower, upper,
           work);
  if (mount("overlay", paths[3], "overlay", 0, data) != 0) fail("cannot mount the overlay on", paths[3]);
}

static bool is_listed(const char* list, dev_t device) {
  for (char* end; list != NULL && *list != '\0'; list = *end == ',' ? end + 1 : NULL) {
    if (strtoull(list, &end, 10) == device) return true;
  }
  return false;
}

// A device number that was in use, in an earlier container of the same processes, would make files of then and of now
// one and the same to whoever tells files apart by device and inode: each file system numbers its inodes from 1.
static void mount_shm(const char* refused) {
  enum { kClone = 1, kEmptyPath = 4 };  // of open_tree and move_mount; not in every C library
  const char* where = "/dev/shm";
  struct stat found;
  int mounts = 0;
  do {  // one on another, so that the numbers that are refused stay taken
    if (mount("tmpfs", where, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777") != 0) fail("cannot mount", where);
    if (stat(where, &found) != 0) fail("cannot look at", where);
    mounts++;
  } while (is_listed(refused, found.st_dev));
  if (mounts == 1) return;
  int last = (int)syscall(SYS_open_tree, AT_FDCWD, where, kClone | O_CLOEXEC);
  if (last < 0) fail("cannot open", where);
  for (; mounts > 0; mounts--) {
    if (umount2(where, 0) != 0) fail("cannot unmount", where);
  }
  if (syscall(SYS_move_mount, last, "", AT_FDCWD, where, kEmptyPath) != 0) fail("cannot mount again", where);
  close(last);
}

static void mount_all(const struct options* o) {
  if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) fail("cannot make private", "the mounts");
  for (int i = 0; i < o->mounts_len;) {
    if (strcmp(o->mounts[i], "--overlay") == 0) {
      mount_overlay(o->mounts + i + 1);
      i += 5;
    } else if (strcmp(o->mounts[i], "--bind") == 0) {
      if (mount(o->mounts[i + 1], o->mounts[i + 2], NULL, MS_BIND | MS_REC, NULL) != 0) {
        fail("cannot bind on", o->mounts[i + 2]);
      }
      i += 3;
    } else {
      i++;
    }
  }
}

static void join_mounts(pid_t pid) {
  int fd = open_pid(pid);
  if (syscall(SYS_setns, fd, CLONE_NEWNS) != 0) fail("cannot join", "the mount namespace of the volume");
  close(fd);
}

static void loopback_up(void) {
  int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct ifreq request;
  memset(&request, 0, sizeof request);
  memcpy(request.ifr_name, "lo", sizeof "lo");
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request) != 0) fail("cannot bring up", "the loopback interface");
  close(fd);
}

static void write_file(const char* path, long value) {
  char text[32];
  int n = snprintf(text, sizeof text, "%ld", value);
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0 || write(fd, text, (size_t)n) != n) fail("cannot write", path);
  close(fd);
}

static void become_failed(int report, const char* what, const char* object) __attribute__((noreturn));
static void become_failed(int report, const char* what, const char* object) {
  dprintf(report, "%s %s: %s", what, object, strerror(errno));
  _exit(127);
}

// In the rank's process: every descriptor it keeps must be opened inside its own mount namespace, and a log that
// grows after the checkpoint must be in append mode, or CRIU refuses to restore it.
static void become_rank(const struct options* o, int report) __attribute__((noreturn));
static void become_rank(const struct options* o, int report) {
  char self[16];
  ssize_t n = readlinkat(o->host_proc, "self", self, sizeof self - 1);
  self[n < 0 ? 0 : n] = '\0';
  dprintf(report, "%d %s\n", (int)getpid(), self);
  if (setpgid(0, 0) != 0) become_failed(report, "cannot start", "a process group");
  const char* output = o->log != NULL ? o->log : "/dev/null";
  int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null < 0 || dup2(null, 0) < 0) become_failed(report, "cannot open", "/dev/null");
  int log = open(output, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640);
  if (log < 0 || dup2(log, 1) < 0 || dup2(log, 2) < 0) become_failed(report, "cannot open the log", output);
  if (o->cwd != NULL && chdir(o->cwd) != 0) become_failed(report, "cannot enter the directory", o->cwd);
  if (o->no_aslr && personality(ADDR_NO_RANDOMIZE) < 0) become_failed(report, "cannot switch off", "randomization");
  if (syscall(SYS_close_range, 3U, ~0U, CLOSE_RANGE_CLOEXEC) != 0 ||
      (o->keep_fd >= 0 && fcntl(o->keep_fd, F_SETFD, 0) != 0)) {
    become_failed(report, "cannot arrange", "the descriptors");
  }
  execvp(o->argv[0], o->argv);
  become_failed(report, "cannot execute", o->argv[0]);
}

// Ends with the status that another process has ended with.
static void end_like(int status) __attribute__((noreturn));
static void end_like(int status) {
  if (WIFSIGNALED(status)) {
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
    _exit(128 + WTERMSIG(status));
  }
  _exit(WEXITSTATUS(status));
}

// The keeper is this program executed once more, so that its executable too was opened inside the container's mounts
// (CRIU cannot dump it otherwise), with the descriptors it needs and what pid 1 was told.
static void execute_keeper(const struct options* o, int report) __attribute__((noreturn));
static void execute_keeper(const struct options* o, int report) {
  int count = 0;
  while (o->all[count] != NULL) count++;
  char** argv = calloc((size_t)count + 6, sizeof *argv);
  char report_text[16], proc_text[16];
  snprintf(report_text, sizeof report_text, "%d", report);
  snprintf(proc_text, sizeof proc_text, "%d", o->host_proc);
  char* extra[] = {o->all[0], "--keeper", report_text, "--host-proc", proc_text};
  if (argv == NULL) become_failed(report, "cannot start", "the keeper");
  memcpy(argv, extra, sizeof extra);
  memcpy(argv + 5, o->all + 1, (size_t)count * sizeof *argv);  // with the NULL
  if (fcntl(report, F_SETFD, 0) != 0 || fcntl(o->host_proc, F_SETFD, 0) != 0) {
    become_failed(report, "cannot arrange", "the descriptors");
  }
  execv(o->all[0], argv);
  become_failed(report, "cannot execute", o->all[0]);
}

static int keep(const struct options* o) {
  int report = o->report_fd;
  fcntl(report, F_SETFD, FD_CLOEXEC);
  fcntl(o->host_proc, F_SETFD, FD_CLOEXEC);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  for (int number = 1; number <= SIGRTMAX; number++) signal(number, SIG_DFL);  // what the launcher ignores
  prctl(PR_SET_NAME, "ergo-keeper");
  if (setsid() < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) become_failed(report, "cannot start", "a session");
  pid_t rank = fork();
  if (rank < 0) become_failed(report, "cannot start", "the rank");
  if (rank == 0) become_rank(o, report);
  int null = open("/dev/null", O_RDWR);
  if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0) _exit(kSetupFailed);
  unsigned from = 3;
  for (int i = 0; i < o->keeper_fds_len; i++) {
    unsigned kept = (unsigned)o->keeper_fds[i];
    if (kept > from) syscall(SYS_close_range, from, kept - 1, 0U);
    from = kept + 1;
  }
  syscall(SYS_close_range, from, ~0U, 0U);
  int status;
  for (;;) {
    pid_t pid = waitpid(-1, &status, 0);
    if (pid == rank) end_like(status);
    if (pid < 0 && errno != EINTR) return kSetupFailed;
  }
}

// What pid 1 knows of the processes below it: pids inside, 0 for not yet.
struct family {
  pid_t keeper;
  pid_t rank;
};

static struct family start_rank(const struct options* o) {
  int report[2];  // the rank writes its two pids, then what kept it from executing, if anything did
  if (pipe2(report, O_CLOEXEC) != 0) fail("cannot make", "a pipe");
  if (o->first_pid > 2) write_file("/proc/sys/kernel/ns_last_pid", o->first_pid - 2);
  pid_t keeper = fork();
  if (keeper < 0) fail("cannot start", "the rank");
  if (keeper == 0) execute_keeper(o, report[1]);
  close(report[1]);
  if (o->keep_fd >= 0) close(o->keep_fd);
  for (int i = 0; i < o->keeper_fds_len; i++) close(o->keeper_fds[i]);
  char text[PATH_MAX + 256];
  size_t filled = 0;
  for (;;) {  // until exec has closed the other end
    ssize_t n = read(report[0], text + filled, sizeof text - 1 - filled);
    if (n <= 0 && !(n < 0 && errno == EINTR)) break;
    if (n > 0) filled += (size_t)n;
  }
  close(report[0]);
  text[filled] = '\0';
  int rank = 0;
  long host = 0;
  int scanned = 0;
  if (sscanf(text, "%d %ld\n%n", &rank, &host, &scanned) != 2 || text[scanned] != '\0') {
    say("error %s", filled == 0 ? "the rank ended before it executed" : text + scanned);
    _exit(kSetupFailed);
  }
  say("running %d %ld", rank, host);
  return (struct family){keeper, rank};
}

static int report_end(int status) {
  if (WIFSIGNALED(status)) {
    say("signal %d", WTERMSIG(status));
    return 128 + WTERMSIG(status);
  }
  say("exit %d", WEXITSTATUS(status));
  return WEXITSTATUS(status);
}

// Which processes CRIU has made is known only afterwards: the launcher says so. The keeper may have ended before the
// word came, therefore the statuses of a restoring init are kept until then (a handful: CRIU reaps its own).
struct ended {
  pid_t pid;
  int status;
};

static bool command(int status_fd, struct family* family) {
  static char text[64];
  static size_t filled = 0;
  ssize_t n = recv(status_fd, text + filled, sizeof text - 1 - filled, MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
  if (n < 0) return true;
  filled += (size_t)n;
  text[filled] = '\0';
  if (strchr(text, '\n') == NULL) return filled < sizeof text - 1;
  int keeper = 0, rank = 0;
  if (sscanf(text, "rank %d %d", &keeper, &rank) != 2 || keeper < 2 || rank < 2) return false;
  filled = 0;
  *family = (struct family){keeper, rank};
  say("running %d 0", rank);
  return true;
}

static int supervise(const struct options* o, struct family family, int signals) {
  struct ended ended[64];
  size_t ended_len = 0;
  for (;;) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
      if (pid == family.keeper) return report_end(status);
      if (family.keeper == 0) {
        ended[ended_len % 64] = (struct ended){pid, status};
        ended_len++;
      }
    }
    struct pollfd fds[2] = {{.fd = signals, .events = POLLIN}, {.fd = o->status_fd, .events = POLLIN}};
    if (poll(fds, 2, -1) < 0 && errno != EINTR) return kSetupFailed;
    if (fds[1].revents != 0) {
      if (!command(o->status_fd, &family)) return kLauncherGone;
      for (size_t i = 0; family.keeper != 0 && i < ended_len && i < 64; i++) {
        if (ended[i].pid == family.keeper) return report_end(ended[i].status);
      }
    }
    struct signalfd_siginfo info;
    if (fds[0].revents != 0 && read(signals, &info, sizeof info) == (ssize_t)sizeof info &&
        (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT) && family.rank > 0) {
      kill(family.rank, (int)info.ssi_signo);
    }
  }
}

static int block_signals(void) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigprocmask(SIG_SETMASK, &set, NULL);
  int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (fd < 0) fail("cannot make", "a signal descriptor");
  return fd;
}

static int pid_one(struct options* o) {
  int signals = block_signals();
  o->host_proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (unshare(CLONE_NEWNS | (o->new_net ? CLONE_NEWNET : 0)) != 0) fail("cannot make", "the namespaces");
  mount_all(o);
  if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) != 0) fail("cannot mount", "/proc");
  mount_shm(o->no_shm);
  if (o->new_net) loopback_up();
  struct family family = {0, 0};
  if (o->mode == kRun) {
    family = start_rank(o);
  } else {
    say("ready");
  }
  return supervise(o, family, signals);
}

static int hold(const struct options* o) {
  if (unshare(CLONE_NEWNS) != 0) fail("cannot make", "the mount namespace");
  mount_all(o);
  say("init %d", (int)getpid());
  say("ready");
  char byte;
  while (recv(o->status_fd, &byte, 1, 0) != 0) {
    if (errno != EINTR) break;
  }
  return 0;
}

static int wait_for(pid_t child) {
  int status;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return kSetupFailed;
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static int launch(struct options* o) {
  if (o->mounts_of != 0) join_mounts(o->mounts_of);
  if (unshare(CLONE_NEWPID) != 0) fail("cannot make", "a pid namespace");
  int self = open_pid(getpid());
  pid_t child = fork();
  if (child < 0) fail("cannot start", "pid 1");
  if (child == 0) {
    die_with_parent(self);
    close(self);
    _exit(pid_one(o));
  }
  say("init %d", (int)child);
  close_all_but(-1);
  return wait_for(child);
}

static int enter(const struct options* o) {
  int target = open_pid(o->enter);
  int flags = CLONE_NEWPID | CLONE_NEWNS | (o->enter_net ? CLONE_NEWNET : 0);
  if (syscall(SYS_setns, target, flags) != 0) fail("cannot enter", "the namespaces of the container");
  close(target);
  int self = open_pid(getpid());
  pid_t child = fork();
  if (child < 0) fail("cannot start", o->argv[0]);
  if (child == 0) {
    die_with_parent(self);
    close(self);
    setsid();
    if (o->no_aslr && personality(ADDR_NO_RANDOMIZE) < 0) fail("cannot switch off", "randomization");
    execv(o->argv[0], o->argv);
    fail("cannot execute", o->argv[0]);
  }
  dprintf(1, "%d\n", (int)child);  // the caller needs the pid to end it
  close_all_but(-1);
  return wait_for(child);
}

static int arguments_of(const char* option) {
  static const struct {
    const char* name;
    int count;
  } known[] = {{"--status-fd", 1}, {"--parent", 1},    {"--mounts-of", 1}, {"--overlay", 4}, {"--bind", 2},
               {"--net", 1},       {"--log", 1},       {"--cwd", 1},       {"--keep-fd", 1}, {"--no-aslr", 0},
               {"--first-pid", 1}, {"--restore", 0},   {"--hold", 0},      {"--enter", 1},   {"--net-too", 0},
               {"--keeper", 1},    {"--host-proc", 1}, {"--keeper-fd", 1}, {"--no-shm", 1}};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (strcmp(option, known[i].name) == 0) return known[i].count;
  }
  return -1;
}

static struct options parse(int argc, char** argv) {
  struct options o = {.status_fd = -1, .keep_fd = -1, .mounts = argv, .all = argv, .report_fd = -1, .host_proc = -1};
  int i = 1;
  while (i < argc && strcmp(argv[i], "--") != 0) {
    const char* name = argv[i];
    int count = arguments_of(name);
    if (count < 0) usage("unknown option");
    if (i + count >= argc) usage("an option lacks its argument");
    const char* value = argv[i + 1];
    if (strcmp(name, "--status-fd") == 0) o.status_fd = (int)number(value);
    if (strcmp(name, "--parent") == 0) o.parent = (pid_t)number(value);
    if (strcmp(name, "--mounts-of") == 0) o.mounts_of = (pid_t)number(value);
    if (strcmp(name, "--keep-fd") == 0) o.keep_fd = (int)number(value);
    if (strcmp(name, "--keeper-fd") == 0) {
      int fd = (int)number(value), last = o.keeper_fds_len > 0 ? o.keeper_fds[o.keeper_fds_len - 1] : 2;
      if (o.keeper_fds_len == kMaxKeeperFds || fd <= last) usage("--keeper-fd: too many, or not in ascending order");
      o.keeper_fds[o.keeper_fds_len++] = fd;
    }
    if (strcmp(name, "--first-pid") == 0) o.first_pid = number(value);
    if (strcmp(name, "--log") == 0) o.log = value;
    if (strcmp(name, "--cwd") == 0) o.cwd = value;
    if (strcmp(name, "--no-shm") == 0) o.no_shm = value;
    if (strcmp(name, "--net") == 0) o.new_net = strcmp(value, "host") != 0;
    if (strcmp(name, "--no-aslr") == 0) o.no_aslr = true;
    if (strcmp(name, "--net-too") == 0) o.enter_net = true;
    if (strcmp(name, "--restore") == 0) o.mode = kRestore;
    if (strcmp(name, "--hold") == 0) o.mode = kHold;
    if (strcmp(name, "--enter") == 0) {
      o.mode = kEnter;
      o.enter = (pid_t)number(value);
    }
    if (strcmp(name, "--host-proc") == 0) o.host_proc = (int)number(value);
    if (strcmp(name, "--keeper") == 0) {
      o.mode = kKeeper;
      o.report_fd = (int)number(value);
    }
    i += 1 + count;
  }
  o.mounts_len = i;
  o.argv = argv + (i < argc ? i + 1 : i);
  bool needs_command = o.mode == kRun || o.mode == kEnter || o.mode == kKeeper;
  if (needs_command != (o.argv[0] != NULL)) usage("a command is missing, or was given where none belongs");
  if (o.mode != kEnter && o.status_fd < 3) usage("--status-fd is missing");
  if (o.keep_fd >= 0 && (o.keep_fd < 3 || o.keep_fd == o.status_fd)) usage("--keep-fd is not a descriptor to keep");
  return o;
}

int main(int argc, char** argv) {
  struct options o = parse(argc, argv);
  if (o.mode == kKeeper) return keep(&o);
  g_status_fd = o.status_fd;
  if (o.status_fd >= 0) fcntl(o.status_fd, F_SETFD, FD_CLOEXEC);
  if (o.parent != 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != o.parent) return kLauncherGone;
  }
  switch (o.mode) {
    case kHold:
      return hold(&o);
    case kEnter:
      return enter(&o);
    default:
      return launch(&o);
  }
}
