// What every kernel shares: names of integers, and the tags of a block table's words (the address is on 128 bytes).
//
// No header of the CUDA toolkit is included anywhere, so that NVRTC needs none installed.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

constexpr u64 TAG_FAR = 1, TAG_INSTALL = 2, TAG_MASK = 127;
