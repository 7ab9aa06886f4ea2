/* In a one-shot exchange each peer makes the result itself. All get the same bits, whatever CPU and program that is. */
#include <fenv.h>
#include <math.h>
#include <poll.h>
#include <string.h>

#include "early.h"
#include "engine.h"
#include "mesh.h"

enum { PEERS = 2, WAIT_MS = 20000 };

static zp_engine *engines[PEERS];
static uint8_t ids[PEERS * ZP_PEER_ID_BYTES];

static void mesh_open(void)
{
	zp_engine_config config = {.thread_count = 1,
				   .stall_timeout_ms = WAIT_MS,
				   .message_bytes_max = 1 << 16,
				   .messages_queued_bytes_max = 1 << 20};
	for (uint32_t rank = 0; rank < PEERS; rank++) {
		id_of(rank, ids + rank * ZP_PEER_ID_BYTES);
		CHECK(zp_engine_open(&config, &engines[rank]) == 0);
	}
	engines_link(engines, (uint32_t[]){0, 1}, 1);
}

static void mesh_close(void)
{
	for (uint32_t rank = 0; rank < PEERS; rank++)
		zp_engine_close(engines[rank]);
}

static void start(uint32_t rank, uint64_t attempt, uint32_t dtype, const void *input, void *output, uint64_t count)
{
	zp_reduce_plan plan = {.attempt = attempt,
			       .kind = ZP_ALL_REDUCE,
			       .dtype = dtype,
			       .op = ZP_SUM,
			       .algorithm = ZP_ONE_SHOT,
			       .world_size = PEERS,
			       .rank = rank,
			       .frame_bytes = 512,
			       .count = count,
			       .peers = ids,
			       .input = input,
			       .output = output};
	CHECK(zp_reduce_start(engines[rank], &plan) == 0);
}

/* Ends the attempt, and returns the digest, which is that of all. */
static uint64_t finish(uint64_t attempt)
{
	zp_event events[PEERS];
	for (uint32_t rank = 0; rank < PEERS; rank++) {
		struct pollfd fd = {.fd = zp_engine_fd(engines[rank]), .events = POLLIN};
		CHECK(poll(&fd, 1, WAIT_MS) == 1 && zp_engine_poll(engines[rank], &events[rank]) == 1);
		CHECK(events[rank].kind == ZP_EVENT_REDUCE_DONE && events[rank].status == 0);
		CHECK(events[rank].id == attempt && events[rank].digest == events[0].digest);
		CHECK(zp_reduce_end(engines[rank], attempt, 1) == 0);
	}
	return events[0].digest;
}

/* Waits until an engine keeps a frame of the first attempt, which it has not begun. */
static void early_await(zp_engine *engine)
{
	for (int ms = 0;; ms++) {
		pthread_mutex_lock(&engine->mutex);
		bool keeps = zp__early_is_kept(engine, 1);
		pthread_mutex_unlock(&engine->mutex);
		if (keeps)
			return;
		CHECK(ms < WAIT_MS);
		poll(NULL, 0, 1);
	}
}

/* The thread that begins an attempt makes the result if the last frame was there before. It may be set to round in
 * another way, or to flush subnormals to zero. */
static void test_environment(void)
{
	mesh_open();
	const float inputs[PEERS] = {1, 0x1p-30f};
	float outputs[PEERS] = {0};
	start(1, 1, ZP_FLOAT, &inputs[1], &outputs[1], 1);
	early_await(engines[0]);
	CHECK(fesetround(FE_UPWARD) == 0);
	start(0, 1, ZP_FLOAT, &inputs[0], &outputs[0], 1);
	CHECK(fegetround() == FE_UPWARD && fesetround(FE_TONEAREST) == 0);
	finish(1);
	CHECK(outputs[0] == 1 && outputs[1] == 1);
	mesh_close();
}

/* Which bits a NaN has differs between instruction sets and compilers, so a result has one NaN only. */
static void test_nans(void)
{
	static const struct {
		uint32_t dtype;
		uint64_t inputs[PEERS][4], nan;
	} cases[] = {
		/* NaNs of both signs; infinities that cancel; one NaN; none */
		{ZP_FLOAT16, {{0x7e01, 0x7c00, 0x7e01, 0}, {0xfe02, 0xfc00, 0x3c00, 0x3c00}}, 0x7e00},
		{ZP_BFLOAT16, {{0x7fc1, 0x7f80, 0x7fc1, 0}, {0xffc2, 0xff80, 0x3f80, 0x3f80}}, 0x7fc0},
		{ZP_FLOAT, {{0x7fc00001, 0x7f800000, 0x7fc00001, 0}, {0xffc00002, 0xff800000, 0x3f800000, 0x3f800000}}, 0x7fc00000},
		{ZP_DOUBLE,
		 {{0x7ff8000000000001, 0x7ff0000000000000, 0x7ff8000000000001, 0},
		  {0xfff8000000000002, 0xfff0000000000000, 0x3ff0000000000000, 0x3ff0000000000000}},
		 0x7ff8000000000000},
	};
	enum { COUNT = 67, BYTES_MAX = COUNT * 8 };
	static uint8_t inputs[PEERS][BYTES_MAX], outputs[PEERS][BYTES_MAX];
	static const size_t sizes[] = {[ZP_FLOAT16] = 2, [ZP_BFLOAT16] = 2, [ZP_FLOAT] = 4, [ZP_DOUBLE] = 8};
	uint64_t attempt = 0;
	mesh_open();
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		size_t bytes = sizes[cases[i].dtype];
		for (uint32_t rank = 0; rank < PEERS; rank++)
			for (size_t k = 0; k < COUNT; k++)
				memcpy(inputs[rank] + k * bytes, &cases[i].inputs[rank][k % 4], bytes);
		attempt++;
		for (uint32_t rank = 0; rank < PEERS; rank++)
			start(rank, attempt, cases[i].dtype, inputs[rank], outputs[rank], COUNT);
		finish(attempt);
		CHECK(memcmp(outputs[0], outputs[1], COUNT * bytes) == 0);
		for (size_t k = 0; k < COUNT; k++) {
			uint64_t wanted = k % 4 < 3 ? cases[i].nan : cases[i].inputs[1][3];
			CHECK(memcmp(outputs[0] + k * bytes, &wanted, bytes) == 0);
		}
	}
	mesh_close();
}

int main(void)
{
	test_environment();
	test_nans();
	return 0;
}
