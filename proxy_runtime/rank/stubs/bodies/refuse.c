// The one place where a call without a body ends. See refuse.h.
#define _GNU_SOURCE
#include "refuse.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

// Every stub is one `lea` of its own address and one jump: the name is found by dladdr, so that no table of
// names takes memory. rsp is 8 off a 16-byte boundary at entry, as in any called function.
__asm__(
    ".text\n"
    ".globl ergo_refuse_entry\n"
    ".hidden ergo_refuse_entry\n"
    ".type ergo_refuse_entry, @function\n"
    "ergo_refuse_entry:\n"
    "  subq $8, %rsp\n"
    "  call ergo_refuse\n"
    "  addq $8, %rsp\n"
    "  ret\n"
    ".size ergo_refuse_entry, . - ergo_refuse_entry\n");

#ifndef ERGO_DECLINE
static const char* name_of(const void* stub) {
  Dl_info info;
  return dladdr(stub, &info) && info.dli_sname ? info.dli_sname : "a function";
}
#endif

long ergo_refuse(const void* stub) {
#if defined(ERGO_ABORT)
  fprintf(stderr,
          "ergosphere: %s of %s was called in a rank; device libraries do not run here. Call it through a torch "
          "operator, which the device proxy executes, or run this job without Ergosphere.\n",
          name_of(stub), ERGO_SONAME);
  abort();
#elif defined(ERGO_RECORD)
  ergo_stub_record(name_of(stub));
  return ERGO_CODE;
#elif defined(ERGO_DECLINE)
  (void)stub;
  return ERGO_CODE;
#endif
}
