// What cuSPARSE says of itself. Everything else of it runs in the device proxy.
#include "defines/cusparse.h"

#include "property.h"

int cusparseGetVersion(void* handle, int* version) { return (void)handle, *version = CUSPARSE_VERSION, 0; }
int cusparseGetProperty(int property, int* value) {
  return ergo_property(property, value, CUSPARSE_VER_MAJOR, CUSPARSE_VER_MINOR, CUSPARSE_VER_PATCH);
}
