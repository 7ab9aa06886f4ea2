/* Attempts that are cancelled at any moment. From the moment that zp_reduce_end() returns, the caller's memory is what it
 * was before (S2) and nobody but the caller touches it (S4): here it is made inaccessible, unmapped or freed at once, so
 * that a thread of the engine that touches it dies, and a system call that does breaks its link, which is seen too. And
 * nothing is left behind: memory, descriptors and threads are counted.
 *
 * Half of the time transfers are cut short at random (support/faults.h), so that frames are cancelled in the middle of
 * their header and body, too. All of it over plain connections, over encrypted ones, where a frame that is cancelled
 * may be half in a record, and over shared memory. Arguments, optional: number of aborts over each of the three. */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "bounds.h"
#include "check.h"
#include "support/faults.h"
#include "support/pair.h"

enum { CONNECTIONS = 3, THREADS = 2, COUNT = 16000, BYTES = COUNT * 4, SETS = 6 };
enum { OUTPUT_BYTES = 2 * BYTES /* of an all-gather; the others have less */ };
enum { ROUNDS_PER_CHECK = 100, ROUNDS_PER_LINK = 50, ROUNDS_PER_ENGINE = 250 };
enum { RESIDENT_GROWTH_BYTES_MAX = 16 << 20 };
/* Shared memory that the other end had not passed at first. */
enum { RINGS_BYTES = 2 * CONNECTIONS * (ZP__SHM_RING_BYTES + 4096) };
enum { IDLE_BYTES_MAX = (4 << 20) + RINGS_BYTES }; /* What engines keep mapped for later. */

#if defined(__SANITIZE_THREAD__) || defined(EMULATED) /* They are slow. */
#define ABORTS 2000
#define ENCRYPTED_ABORTS 500
#else
#define ABORTS 10000
#define ENCRYPTED_ABORTS 2000
#endif

/* Where an attempt's memory is from, and so what becomes of it when the attempt has ended. */
enum memory { LOCKED, UNMAPPED, FREED, MEMORIES };

typedef struct {
	int32_t *input[2], *output[2];
} buffers;

static buffers sets[SETS]; /* locked whenever no attempt uses them */
static pair both;
static bool is_encrypted, is_shared;
static bool loses_connections; /* now, because the test breaks one */
static uint64_t next_id, seed = 88172645463325252u;

static int32_t value_of(int side, uint64_t id, size_t i)
{
	return (int32_t)(uint32_t)((unsigned)(side + 1) * 2654435761u + (unsigned)id * 40503u + (unsigned)i * 97u);
}

static int32_t *memory_take(enum memory memory, int32_t *locked, size_t bytes)
{
	if (memory == LOCKED)
		guarded_unlock((uint8_t *)locked, bytes);
	int32_t *taken = memory == LOCKED     ? locked
			 : memory == UNMAPPED ? (int32_t *)(void *)guarded_new(bytes)
					      : malloc(bytes);
	CHECK(taken);
	return taken;
}

static void memory_give_back(enum memory memory, int32_t *taken, size_t bytes)
{
	if (memory == LOCKED)
		guarded_lock((uint8_t *)taken, bytes);
	else if (memory == UNMAPPED)
		guarded_free((uint8_t *)taken, bytes);
	else
		free(taken);
}

typedef struct {
	uint64_t id;
	uint32_t kind;
	enum memory memory;
	buffers buffers;
} attempt;

static void attempt_take(attempt *a, uint64_t round)
{
	a->id = next_id++;
	a->kind = (uint32_t)(random_next(&seed) % PAIR_KINDS);
	a->memory = (enum memory)(random_next(&seed) % MEMORIES);
	for (int side = 0; side < 2; side++) {
		buffers *set = &sets[round % SETS];
		a->buffers.input[side] = memory_take(a->memory, set->input[side], BYTES);
		a->buffers.output[side] = a->buffers.input[side];
		if (!kind_is_in_place(a->kind))
			a->buffers.output[side] = memory_take(a->memory, set->output[side], OUTPUT_BYTES);
		for (size_t i = 0; i < COUNT; i++)
			a->buffers.input[side][i] = value_of(side, a->id, i);
	}
}

static void attempt_start(const attempt *a, int side)
{
	zp_reduce_plan plan =
		pair_plan(side, a->id, a->kind, a->buffers.input[side], a->buffers.output[side], COUNT);
	plan.frame_bytes = 512u << a->id % 8;
	CHECK(zp_reduce_start(both.engines[side], &plan) == 0);
}

static void buffers_give_back(const attempt *a, int side)
{
	memory_give_back(a->memory, a->buffers.input[side], BYTES);
	if (!kind_is_in_place(a->kind))
		memory_give_back(a->memory, a->buffers.output[side], OUTPUT_BYTES);
}

/* The attempt has ended here without a result. */
static void memory_check(const attempt *a, int side)
{
	for (size_t i = 0; kind_keeps_input(a->kind) && i < COUNT; i++)
		CHECK(a->buffers.input[side][i] == value_of(side, a->id, i));
	buffers_give_back(a, side);
}

static void attempt_abort(const attempt *a, int side)
{
	CHECK(zp_reduce_end(both.engines[side], a->id, 0) == 0);
	memory_check(a, side);
}

static void spin(uint64_t turns)
{
	for (uint64_t i = random_next(&seed) % turns; i; i--)
		__asm__ volatile("" ::: "memory");
}

/* Takes what there is. A loss would mean that a system call touched memory that is no longer the engine's. */
static void events_take(int side)
{
	zp_event event;
	while (zp_engine_poll(both.engines[side], &event) == 1) {
		CHECK(event.kind != ZP_EVENT_LINK_LOST && event.status != -EFAULT);
		CHECK(event.status == 0 || (loses_connections && event.kind == ZP_EVENT_CONNECTION_LOST));
	}
}

static void link_lost_await(int side)
{
	for (bool lost = false; !lost;) {
		event_await(both.engines[side]);
		zp_event event;
		while (zp_engine_poll(both.engines[side], &event) == 1)
			lost |= event.kind == ZP_EVENT_LINK_LOST;
	}
}

/* Both start, or only one of them does; both cancel. */
static void round_abort(const attempt *a)
{
	int first = (int)(random_next(&seed) % 2), lonely = random_next(&seed) % 4 == 0;
	attempt_start(a, first);
	if (!lonely)
		attempt_start(a, !first);
	spin(100000);
	attempt_abort(a, first);
	spin(20000);
	attempt_abort(a, !first);
	events_take(0);
	events_take(1);
}

static const faults_fault *fault_of(enum faults_call call, enum faults_effect effect)
{
	const faults_fault *fault = faults_all;
	while (fault->call != call || fault->effect != effect)
		fault++;
	return fault;
}

/* One of the connections goes while the attempt runs, and its frames are retransmitted while it is cancelled. True: one went. */
static bool round_connection_breaks(const attempt *a)
{
	bool sends = random_next(&seed) % 2;
	faults_disarm();
	faults_arm(fault_of(sends ? FAULTS_SENDMSG : FAULTS_RECVMSG, FAULTS_RESET),
		   1 + random_next(&seed) % (is_encrypted ? 8 : 30));
	loses_connections = true;
	round_abort(a);
	return faults_disarm() > 0;
}

/* The link goes while the attempt runs. */
static void round_link_closes(const attempt *a)
{
	attempt_start(a, 0);
	attempt_start(a, 1);
	spin(100000);
	uint8_t id[ZP_PEER_ID_BYTES];
	pair_id(1, id);
	CHECK(zp_link_close(both.engines[0], id) == 0);
	link_lost_await(1);
	attempt_abort(a, 0);
	attempt_abort(a, 1);
	zp_event event;
	while (zp_engine_poll(both.engines[0], &event) == 1)
		;
	CHECK(pair_link(&both, CONNECTIONS, is_encrypted) == 0);
	loses_connections = false;
}

/* The engines go while the attempt runs. */
static void round_engines_close(const attempt *a)
{
	attempt_start(a, 0);
	attempt_start(a, 1);
	spin(100000);
	for (int side = 0; side < 2; side++) {
		zp_engine_close(both.engines[side]);
		both.engines[side] = NULL;
		memory_check(a, side);
	}
	CHECK(pair_open(&both, THREADS, is_shared) == 0 && pair_link(&both, CONNECTIONS, is_encrypted) == 0);
	loses_connections = false;
}

/* After all that, one that runs to its end. */
static void round_commit(const attempt *a)
{
	for (int side = 0; side < 2; side++)
		attempt_start(a, side);
	for (int side = 0; side < 2; side++) {
		zp_event event = {.kind = 0};
		while (event.kind != ZP_EVENT_REDUCE_DONE) {
			event_await(both.engines[side]);
			while (event.kind != ZP_EVENT_REDUCE_DONE && zp_engine_poll(both.engines[side], &event) == 1)
				CHECK(event.kind != ZP_EVENT_LINK_LOST && event.status == 0);
		}
		CHECK(event.id == a->id);
	}
	for (int side = 0; side < 2; side++)
		CHECK(zp_reduce_end(both.engines[side], a->id, 1) == 0);
	for (int side = 0; side < 2; side++) {
		const int32_t *output = a->buffers.output[side];
		CHECK(kind_is_quantised(a->kind) || pair_result_is_right(side, a->kind, output, COUNT, value_of, a->id));
		buffers_give_back(a, side);
	}
}

typedef struct {
	int64_t blocks, mapped_bytes, resident_bytes;
	int fds, threads;
} held;

static int64_t resident_bytes(void)
{
	long pages = 0;
	FILE *file = fopen("/proc/self/statm", "r");
	CHECK(file && fscanf(file, "%*d %ld", &pages) == 1);
	fclose(file);
	return (int64_t)pages * sysconf(_SC_PAGESIZE);
}

static held held_now(void)
{
	return (held){faults_blocks(), faults_mapped_bytes(), resident_bytes(), fds_but_memory(), threads_now()};
}

/* Copies of frames that were half-sent are freed once they have left, so that is waited for. */
static void held_check(const held *before, int64_t idle_bytes_max)
{
	for (int ms = 0; faults_blocks() != before->blocks; ms++) {
		CHECK(ms < PAIR_WAIT_MS);
		poll(NULL, 0, 1);
	}
	held now = held_now();
	CHECK(now.mapped_bytes - before->mapped_bytes <= idle_bytes_max && now.fds == before->fds);
	threads_await(before->threads);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(EMULATED)
	CHECK(now.resident_bytes - before->resident_bytes < RESIDENT_GROWTH_BYTES_MAX);
#endif
}

static void sets_make(void)
{
	for (int set = 0; set < SETS; set++)
		for (int side = 0; side < 2; side++) {
			sets[set].input[side] = (int32_t *)(void *)guarded_new(BYTES);
			sets[set].output[side] = (int32_t *)(void *)guarded_new(OUTPUT_BYTES);
			guarded_lock((uint8_t *)sets[set].input[side], BYTES);
			guarded_lock((uint8_t *)sets[set].output[side], OUTPUT_BYTES);
		}
}

static void test_aborts(uint64_t rounds)
{
	held at_first = held_now();
	CHECK(pair_open(&both, THREADS, is_shared) == 0 && pair_link(&both, CONNECTIONS, is_encrypted) == 0);
	next_id = PAIR_FIRST_ATTEMPT;
	attempt a;
	attempt_take(&a, 0);
	round_commit(&a);
	held before = held_now(); /* All frames have left, and none was cancelled yet. */
	uint64_t broken = 0;
	for (uint64_t round = 1; round <= rounds; round++) {
		attempt_take(&a, round);
		if (round % 2)
			faults_storm(round, 2, true);
		if (round % ROUNDS_PER_ENGINE == 0)
			round_engines_close(&a);
		else if (round % ROUNDS_PER_LINK == 0)
			round_link_closes(&a);
		else if (round % ROUNDS_PER_LINK == ROUNDS_PER_LINK - 1)
			broken += round_connection_breaks(&a);
		else
			round_abort(&a);
		faults_disarm();
		if (round % ROUNDS_PER_CHECK)
			continue;
		attempt_take(&a, round);
		round_commit(&a);
		held_check(&before, IDLE_BYTES_MAX);
	}
	pair_close(&both);
	held_check(&at_first, 0);
	printf("    %lu aborts%s%s, %lu connections broken on the way\n", (unsigned long)rounds,
	       is_encrypted ? ", encrypted" : "", is_shared ? ", shared memory" : "", (unsigned long)broken);
}

static zp_link_stats link_stats(int side)
{
	uint8_t id[ZP_PEER_ID_BYTES];
	zp_link_stats stats;
	pair_id(!side, id);
	CHECK(zp_link_get_stats(both.engines[side], id, &stats) == 0);
	return stats;
}

static uint64_t sent_bytes(uint32_t connection)
{
	return link_stats(0).tx_bytes[connection];
}

static int message_round_trip(void)
{
	for (int side = 0; side < 2; side++) {
		uint8_t other[ZP_PEER_ID_BYTES];
		pair_id(!side, other);
		int rc = zp_message_post(both.engines[side], other, PAIR_CHANNEL, "hello", 5, NULL, 0, UINT64_MAX);
		zp_event event = {.kind = 0};
		while (rc == 0 && event.kind != ZP_EVENT_MESSAGE && event.kind != ZP_EVENT_LINK_LOST) {
			event_await(both.engines[!side]);
			while (event.kind != ZP_EVENT_MESSAGE && event.kind != ZP_EVENT_LINK_LOST &&
			       zp_engine_poll(both.engines[!side], &event) == 1)
				;
		}
		if (rc == 0 && event.kind == ZP_EVENT_LINK_LOST)
			rc = event.status;
		if (rc < 0)
			return rc;
		CHECK(event.body_bytes == 5 && memcmp(event.body, "hello", 5) == 0);
		zp_message_release(both.engines[!side], event.body);
	}
	return 0;
}

/* A frame that is half-sent, because the other side does not take it, is finished from a copy; and where there is no
 * memory for the copy its connection ends. `nth`: the allocation that fails, counted from 1, or 0. */
static bool half_sent_abort(uint64_t nth)
{
	const size_t bytes = 6 << 20;
	const faults_fault *no_memory = fault_of(FAULTS_MALLOC, FAULTS_FAIL);
	held before = held_now();
	uint8_t *input = guarded_new(bytes), *output = guarded_new(bytes);
	memset(input, 5, bytes);
	CHECK(pair_open(&both, 1, is_shared) == 0 && pair_link(&both, 2, is_encrypted) == 0);
	zp_reduce_plan plan = pair_plan(0, PAIR_FIRST_ATTEMPT, 0, input, output, bytes / 4);
	plan.frame_bytes = 3 << 19;
	CHECK(zp_reduce_start(both.engines[0], &plan) == 0);
	/* More than a header has left on each connection, and less than a frame, for that has no room in a socket, or in
	 * shared memory. */
	while (sent_bytes(0) <= 100 || sent_bytes(1) <= 100)
		poll(NULL, 0, 1);
	faults_arm(no_memory, nth);
	CHECK(zp_reduce_end(both.engines[0], PAIR_FIRST_ATTEMPT, 0) == 0);
	bool struck = faults_disarm() > 0;
	guarded_free(output, bytes);
	guarded_free(input, bytes);
	CHECK(zp_reduce_end(both.engines[1], PAIR_FIRST_ATTEMPT, 0) == 0);
	CHECK(message_round_trip() == 0);
	for (int side = 0; side < 2; side++)
		while (link_stats(side).open_count != (struck ? 1 : 2)) /* The other connection goes on. */
			poll(NULL, 0, 1);
	pair_close(&both);
	held_check(&before, 0);
	return struck;
}

int main(int argc, char **argv)
{
	first_thread();
	sets_make();
	const uint64_t aborts[] = {ABORTS, ENCRYPTED_ABORTS, ABORTS};
	for (int variant = 0; variant < 3; variant++) {
		is_encrypted = variant == 1;
		is_shared = variant == 2;
		test_aborts(argc > 1 + variant ? strtoull(argv[1 + variant], NULL, 10) : aborts[variant]);
		CHECK(!half_sent_abort(0));
		uint64_t nth = 1;
		while (half_sent_abort(nth))
			nth++;
		CHECK(nth > 1);
	}
	return 0;
}
