// What cuSPARSELt says of itself. Everything else of it runs in the device proxy. torch makes a handle only to
// ask for the version, so a handle can be made and given back.
#include "defines/cusparseLt.h"

#include "property.h"

int cusparseLtInit(void* handle) { return (void)handle, 0; }
int cusparseLtDestroy(const void* handle) { return (void)handle, 0; }
int cusparseLtGetVersion(const void* handle, int* version) { return (void)handle, *version = CUSPARSELT_VERSION, 0; }
int cusparseLtGetProperty(int property, int* value) {
  return ergo_property(property, value, CUSPARSELT_VER_MAJOR, CUSPARSELT_VER_MINOR, CUSPARSELT_VER_PATCH);
}
