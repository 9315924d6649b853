// As util/Exception.h.
#pragma once

#define C10_LIKELY(x) (x)
#define C10_UNLIKELY(x) (x)
