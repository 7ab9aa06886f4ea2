/* Two engines in one process, linked by socket pairs, as peers of a ring of two; and what a process holds. */
#ifndef PAIR_H
#define PAIR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "zp_api.h"

enum { PAIR_CHANNEL = 1, PAIR_FIRST_ATTEMPT = 2, PAIR_WAIT_MS = 60000 };

typedef struct {
	zp_engine *engines[2];
} pair;

/* Whose id the engine of `side` is called by. */
void pair_id(int side, uint8_t id[ZP_PEER_ID_BYTES]);

/* Opens both engines and PAIR_CHANNEL on them; `shared`: their connections use shared memory. On failure, -errno, both are
 * closed. */
int pair_open(pair *both, uint32_t thread_count, bool shared);

/* Links them, by encrypted connections or others. On failure there may be a link of one. */
int pair_link(pair *both, uint32_t connection_count, bool encrypted);

void pair_close(pair *both);

/* What attempts differ in. All-reduces in a ring and direct: out of place, in place with and without restore, and
 * quantised, in place. Then one each of the other collectives; the chunk, row or part of number i belongs to rank 1 - i.
 * Then all-reduces in one shot, which are not quantised, and over lanes. */
enum { PAIR_ALL_REDUCES = 8, PAIR_BROADCAST = PAIR_ALL_REDUCES, PAIR_ALL_GATHER, PAIR_REDUCE_SCATTER };
enum { PAIR_ONE_SHOT = PAIR_REDUCE_SCATTER + 1, PAIR_LANES = PAIR_ONE_SHOT + 3, PAIR_KINDS = PAIR_LANES + 4 };
bool kind_is_in_place(uint32_t kind);
bool kind_restores(uint32_t kind);
bool kind_is_quantised(uint32_t kind);
/* After an abort the input is as it was. */
static inline bool kind_keeps_input(uint32_t kind)
{
	return !kind_is_in_place(kind) || kind_restores(kind);
}

/* Elements of the output of an attempt of `count` elements. */
uint64_t pair_output_count(int side, uint32_t kind, uint64_t count);

/* Whether an attempt that is not quantised has the right result for the inputs value(side, seed, i) of the element i. */
bool pair_result_is_right(int side, uint32_t kind, const int32_t *output, uint64_t count,
			  int32_t (*value)(int side, uint64_t seed, size_t i), uint64_t seed);

/* Elements of a lane of PAIR_LANES. */
uint64_t pair_lane_elements(uint32_t lane, uint64_t count);

/* A plan of two for `side`: a SUM, of INT32 if it is not quantised. The caller may change it. What it points to is valid until
 * the next call. */
zp_reduce_plan pair_plan(int side, uint64_t attempt, uint32_t kind, void *input, void *output, uint64_t count);

/* Waits until an event waits in `engine`. */
void event_await(zp_engine *engine);

/* `bytes` bytes that end where a page begins that nobody may touch, after one that nobody may touch. */
uint8_t *guarded_new(size_t bytes);
/* From now on nobody may read or write them, or everybody again. */
void guarded_lock(uint8_t *memory, size_t bytes);
void guarded_unlock(uint8_t *memory, size_t bytes);
void guarded_free(uint8_t *memory, size_t bytes);

/* Entries of /proc/self/fd or /proc/self/task. */
int open_fds(void);
/* The same without shared memory, which an engine that runs has open for a moment, until it is mapped. */
int fds_but_memory(void);
/* Waits until the process has `count` threads: one that was joined is seen for a moment longer. */
void threads_await(int count);
int threads_now(void);
/* ThreadSanitizer has a thread of its own from the program's first on: this starts it, to be counted. */
void first_thread(void);

#endif
