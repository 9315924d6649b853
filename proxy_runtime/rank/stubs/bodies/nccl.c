// What NCCL says of itself. Collectives go through the channel to the device proxy.
#include "defines/nccl.h"

int ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, 0; }
int pncclGetVersion(int* version) { return ncclGetVersion(version); }
