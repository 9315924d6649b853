/* How the stub of the CUDA runtime asks for the place of a stream or an event in the channel to the device proxy.
 * None of it throws; all of it may be called from any thread. */
#pragma once

#include <stdint.h>

struct ergo_queue {
  /* A place after everything that was issued. `marker` != 0: the device also keeps the moment when it gets there. */
  uint64_t (*record)(uint64_t marker);
  /* Whether the device has got to a place. */
  int (*passed)(uint64_t place);
  /* Milliseconds from one kept moment to another, after the device has got to both. 0, or -1: one is not there. */
  int (*elapsed)(uint64_t from, uint64_t to, float* ms);
  void (*forget)(uint64_t marker);
  /* Why the device is lost to this process, as CUDA's text of an error; null: it is not. */
  const char* (*fault)(void);
};
