/* A fuzz target is one program: one of fuzz_*.c, and either libFuzzer or runner.c, which needs no clang. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#endif
