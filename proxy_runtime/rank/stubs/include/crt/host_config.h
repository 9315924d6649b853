// Stands in for the header of the same name of the NVIDIA compiler's package: nothing to configure here.
#pragma once
