/* Every call that can fail, failing in every way that it can, one at a time: two engines move collectives of all kinds and
 * messages, and the first call of a kind fails, then in another run the second, and so on until a run makes fewer calls.
 * Then storms, in which many fail at random. All of it over plain connections, over encrypted ones, and over shared memory.
 *
 * Whatever fails, nothing hangs, nothing leaks, no byte is wrong: a call says so, an event says so, or the work is done.
 * After faults that are no failures (EINTR, a short write), and after the loss of one connection of the two, all work is
 * done. tests/native/support/faults.h has the shim.
 *
 * Arguments, all optional: strike every nth call only (for slow builds), number of storms, threads of an engine. */
#include <errno.h>
#include <poll.h>
#include <string.h>

#include "check.h"
#include "support/faults.h"
#include "support/pair.h"

enum { CONNECTIONS = 2, COUNT = 701, MESSAGES = 3 };
static const uint32_t message_bytes[MESSAGES] = {0, 5000, 100000};

/* Of all but two threads and connections that are not encrypted, one run in so many. */
#if defined(__SANITIZE_THREAD__) || defined(EMULATED)
#define SPARSE 4 /* They are slow. */
#else
#define SPARSE 1
#endif

typedef struct {
	int32_t *input[2], *output[2];
	bool started[2], done[2];
	uint64_t digest[2];
} attempt;

static attempt attempts[PAIR_KINDS];
static uint8_t body[100000];
static uint32_t thread_count = 1;
static bool is_encrypted, is_shared;

static int32_t value_of(int side, uint64_t kind, size_t i)
{
	return (int32_t)(uint32_t)((unsigned)(side + 1) * 2654435761u + (unsigned)kind * 40503u + (unsigned)i * 97u);
}

static void buffers_make(void)
{
	for (uint32_t kind = 0; kind < PAIR_KINDS; kind++)
		for (int side = 0; side < 2; side++) {
			void *input = guarded_new(COUNT * sizeof(int32_t));
			attempts[kind].input[side] = input;
			uint64_t outputs = pair_output_count(side, kind, COUNT);
			bool in_place = kind_is_in_place(kind);
			attempts[kind].output[side] = in_place ? input : (void *)guarded_new(outputs * sizeof(int32_t));
		}
	memset(body, 7, sizeof body);
}

static void attempts_reset(void)
{
	for (uint32_t kind = 0; kind < PAIR_KINDS; kind++)
		for (int side = 0; side < 2; side++) {
			attempt *a = &attempts[kind];
			a->started[side] = a->done[side] = false;
			for (size_t i = 0; i < COUNT; i++)
				a->input[side][i] = value_of(side, kind, i);
		}
}

static uint64_t id_of(uint32_t kind)
{
	return PAIR_FIRST_ATTEMPT + (uint64_t)kind;
}

static int attempts_start(pair *both)
{
	int rc = 0;
	for (uint32_t kind = 0; rc == 0 && kind < PAIR_KINDS; kind++)
		for (int side = 0; rc == 0 && side < 2; side++) {
			attempt *a = &attempts[kind];
			zp_reduce_plan plan =
				pair_plan(side, id_of(kind), kind, a->input[side], a->output[side], COUNT);
			rc = zp_reduce_start(both->engines[side], &plan);
			a->started[side] = rc == 0;
		}
	return rc;
}

static int messages_send(pair *both)
{
	int rc = 0;
	for (int side = 0; rc == 0 && side < 2; side++) {
		uint8_t other[ZP_PEER_ID_BYTES];
		pair_id(!side, other);
		for (int i = 0; rc == 0 && i < MESSAGES; i++)
			rc = zp_message_post(both->engines[side], other, PAIR_CHANNEL, body, message_bytes[i], NULL, 0, UINT64_MAX);
	}
	return rc;
}

/* Notes what an engine says. Returns its error, else 0. */
static int event_take(pair *both, int side, const zp_event *event, int *messages)
{
	if (event->kind == ZP_EVENT_MESSAGE) {
		bool known = false;
		for (int i = 0; i < MESSAGES; i++)
			known |= event->body_bytes == message_bytes[i];
		CHECK(known && event->id == PAIR_CHANNEL && memcmp(event->body, body, event->body_bytes) == 0);
		zp_message_release(both->engines[side], event->body);
		++*messages;
		return 0;
	}
	if (event->kind == ZP_EVENT_REDUCE_DONE && event->status == 0) {
		attempt *a = &attempts[event->id - PAIR_FIRST_ATTEMPT];
		CHECK(a->started[side] && !a->done[side]);
		a->done[side] = true;
		a->digest[side] = event->digest;
		return 0;
	}
	if (event->kind == ZP_EVENT_REDUCE_DONE || event->kind == ZP_EVENT_LINK_LOST) {
		CHECK(event->status < 0);
		return event->status;
	}
	return 0;
}

static bool all_done(int messages)
{
	for (uint32_t kind = 0; kind < PAIR_KINDS; kind++)
		for (int side = 0; side < 2; side++)
			if (!attempts[kind].done[side])
				return false;
	return messages == 2 * MESSAGES;
}

/* Waits until all is done or something failed; returns 0 or its error. */
static int events_wait(pair *both)
{
	int messages = 0, rc = 0;
	while (rc == 0 && !all_done(messages)) {
		struct pollfd fds[2];
		for (int side = 0; side < 2; side++)
			fds[side] = (struct pollfd){.fd = zp_engine_fd(both->engines[side]), .events = POLLIN};
		CHECK(poll(fds, 2, PAIR_WAIT_MS) > 0); /* Else it hangs. */
		for (int side = 0; side < 2; side++) {
			zp_event event;
			while (rc == 0 && zp_engine_poll(both->engines[side], &event) == 1)
				rc = event_take(both, side, &event, &messages);
		}
	}
	return rc;
}

static void result_check(uint32_t kind)
{
	const attempt *a = &attempts[kind];
	CHECK(a->digest[0] == a->digest[1]);
	for (int side = 0; !kind_is_quantised(kind) && side < 2; side++)
		CHECK(pair_result_is_right(side, kind, a->output[side], COUNT, value_of, kind));
	CHECK(!kind_is_quantised(kind) || memcmp(a->output[0], a->output[1], COUNT * sizeof(int32_t)) == 0);
}

static void input_check(uint32_t kind, int side)
{
	for (size_t i = 0; i < COUNT; i++)
		CHECK(attempts[kind].input[side][i] == value_of(side, kind, i));
}

static void attempts_end(pair *both, int rc)
{
	for (uint32_t kind = 0; kind < PAIR_KINDS; kind++)
		for (int side = 0; side < 2; side++)
			CHECK(zp_reduce_end(both->engines[side], id_of(kind), rc == 0) == 0);
	for (uint32_t kind = 0; kind < PAIR_KINDS; kind++) {
		if (rc == 0)
			result_check(kind);
		for (int side = 0; side < 2; side++)
			if (!kind_is_in_place(kind) || (rc < 0 && kind_restores(kind)))
				input_check(kind, side);
	}
}

/* All the work once. Returns 0 or the first error. */
static int work(void)
{
	pair both;
	attempts_reset();
	int rc = pair_open(&both, thread_count, is_shared);
	if (rc < 0)
		return rc;
	rc = pair_link(&both, CONNECTIONS, is_encrypted);
	if (rc == 0)
		rc = attempts_start(&both);
	if (rc == 0)
		rc = messages_send(&both);
	if (rc == 0)
		rc = events_wait(&both);
	attempts_end(&both, rc);
	pair_close(&both);
	return rc;
}

typedef struct {
	int64_t blocks, mapped_bytes;
	int fds, threads;
} held;

static held held_now(void)
{
	return (held){faults_blocks(), faults_mapped_bytes(), open_fds(), threads_now()};
}

static void held_check(const held *before)
{
	held now = held_now();
	CHECK(now.blocks == before->blocks && now.mapped_bytes == before->mapped_bytes && now.fds == before->fds);
	threads_await(before->threads);
}

static void outcome_check(const faults_fault *fault, uint64_t nth, bool struck, int rc)
{
	bool right = rc == 0 ? !struck || fault->outcome != FAULTS_MUST_END
			     : struck && fault->outcome >= FAULTS_MAY_END;
	right &= rc != -EPROTO && rc != -EBADMSG; /* Nobody else is to blame. */
	if (!right)
		fprintf(stderr, "%s, call %lu%s%s: %s\n", fault->name, (unsigned long)nth, is_encrypted ? ", encrypted" : "",
			is_shared ? ", shared memory" : "", rc ? strerror(-rc) : "not seen");
	CHECK(right);
}

static void test_each_call(uint64_t stride)
{
	uint64_t runs = 0;
	held before = held_now();
	for (uint32_t i = 0; i < faults_count; i++) {
		const faults_fault *fault = &faults_all[i];
		bool struck = true;
		for (uint64_t nth = 1; struck; nth += stride) {
			faults_arm(fault, nth);
			int rc = work();
			struck = faults_disarm() > 0;
			outcome_check(fault, nth, struck, rc);
			held_check(&before);
			runs++;
		}
	}
	printf("    %lu runs, each with one of %u faults at one call%s%s\n", (unsigned long)runs, faults_count,
	       is_encrypted ? ", encrypted" : "", is_shared ? ", shared memory" : "");
}

static void test_storms(uint64_t storms)
{
	uint64_t struck = 0, failed = 0;
	held before = held_now();
	for (uint64_t seed = 1; seed <= storms; seed++) {
		bool only_harmless = seed % 2;
		faults_storm(seed, only_harmless ? 3 : 100, only_harmless);
		int rc = work();
		uint64_t now = faults_disarm();
		if (rc < 0 && (only_harmless || !now))
			fprintf(stderr, "storm %lu: %s\n", (unsigned long)seed, strerror(-rc));
		CHECK(rc == 0 || (now && !only_harmless));
		held_check(&before);
		struck += now;
		failed += rc < 0;
	}
	printf("    %lu storms, %lu faults, %lu of them ended the work\n", (unsigned long)storms, (unsigned long)struck,
	       (unsigned long)failed);
}

int main(int argc, char **argv)
{
	uint64_t stride = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
	uint64_t storms = argc > 2 ? strtoull(argv[2], NULL, 10) : 300;
	first_thread();
	buffers_make();
	for (uint32_t variant = 0; variant < 8; variant++) {
		thread_count = 1 + variant % 2;
		is_encrypted = variant / 2 % 2;
		is_shared = variant / 4;
		uint64_t sparse = is_encrypted || thread_count == 1 ? SPARSE : 1;
		test_each_call(stride * sparse);
		test_storms(storms / sparse);
	}
	return 0;
}
