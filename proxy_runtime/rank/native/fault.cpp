#include "fault.hpp"

#include <signal.h>
#include <unistd.h>

namespace ergo::rank {
namespace {

struct sigaction previous;

void on_fault(int, siginfo_t* info, void*) {
  // A non-canonical address faults without saying which one: si_addr is null and the kernel is the source.
  if (info->si_code == SI_KERNEL && info->si_addr == nullptr) {
    static const char text[] =
        "ergosphere: native code dereferenced the address of a device tensor. Its memory is in the device proxy; "
        "only operators registered with torch's dispatcher can work on it.\n";
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
  }
  // The instruction runs again and faults into the previous handler, or ends the process.
  sigaction(SIGSEGV, &previous, nullptr);
  if (info->si_code <= 0) raise(SIGSEGV);  // sent by a process: there is no instruction that would fault again
}

}  // namespace

void install_fault_handler() {
  struct sigaction action{};
  action.sa_sigaction = &on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous);
}

}  // namespace ergo::rank
