#include "../module.h"

DMJD_MODULE(_C_hopper)
