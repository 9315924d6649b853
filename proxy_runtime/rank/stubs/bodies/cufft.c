// What cuFFT says of itself. Everything else of it runs in the device proxy.
#include "defines/cufft.h"

#include "property.h"

int cufftGetVersion(int* version) { return *version = CUFFT_VERSION, 0; }
int cufftGetProperty(int property, int* value) {
  return ergo_property(property, value, CUFFT_VER_MAJOR, CUFFT_VER_MINOR, CUFFT_VER_PATCH);
}
