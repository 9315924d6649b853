// What CUPTI says of itself. Everything else answers "not supported": a profiler goes on without device activity.
#include <stdint.h>

#include "defines/cupti_version.h"

int cuptiGetVersion(uint32_t* version) { return *version = CUPTI_API_VERSION, 0; }
int cuptiGetResultString(int result, const char** text) {
  return *text = result ? "not supported in a rank (Ergosphere)" : "CUPTI_SUCCESS", 0;
}
