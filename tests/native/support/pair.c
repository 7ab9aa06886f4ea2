/* See pair.h. */
#define _GNU_SOURCE
#include "pair.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../check.h"
#include "../cipher.h"

#define PAGE_BYTES ((size_t)4096)

void pair_id(int side, uint8_t id[ZP_PEER_ID_BYTES])
{
	memset(id, side + 1, ZP_PEER_ID_BYTES);
}

int pair_open(pair *both, uint32_t thread_count, bool shared)
{
	zp_engine_config config = {.thread_count = thread_count,
				   .stall_timeout_ms = 10 * PAIR_WAIT_MS,
				   .path_timeout_ms = 10 * PAIR_WAIT_MS,
				   .message_bytes_max = 1 << 20,
				   .messages_queued_bytes_max = 16 << 20,
				   .shared_memory = shared};
	*both = (pair){{NULL, NULL}};
	int rc = 0;
	for (int side = 0; rc == 0 && side < 2; side++) {
		rc = zp_engine_open(&config, &both->engines[side]);
		if (rc == 0)
			rc = zp_channel_open(both->engines[side], PAIR_CHANNEL, -1);
	}
	if (rc < 0)
		pair_close(both);
	return rc;
}

int pair_link(pair *both, uint32_t connection_count, bool encrypted)
{
	int fds[2][ZP_LINK_CONNECTIONS_MAX], rc = 0;
	zp_aead aeads[2][ZP_LINK_CONNECTIONS_MAX];
	for (uint32_t i = 0; i < connection_count; i++) {
		int ends[2];
		CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
		fds[0][i] = ends[0];
		fds[1][i] = ends[1];
		uint8_t key = (uint8_t)(2 * i);
		aeads[0][i] = cipher_aead(key, key + 1);
		aeads[1][i] = cipher_aead(key + 1, key);
	}
	for (int side = 0; side < 2; side++) {
		uint8_t other[ZP_PEER_ID_BYTES];
		uint64_t link;
		pair_id(!side, other);
		if (rc == 0)
			rc = zp_link_open(both->engines[side], other, fds[side], encrypted ? aeads[side] : NULL, connection_count,
					  &link);
		for (uint32_t i = 0; rc < 0 && i < connection_count; i++)
			close(fds[side][i]); /* They are still ours. */
	}
	return rc;
}

void pair_close(pair *both)
{
	for (int side = 0; side < 2; side++)
		zp_engine_close(both->engines[side]);
	*both = (pair){{NULL, NULL}};
}

enum { OUT_OF_PLACE, IN_PLACE_RESTORE, IN_PLACE, QUANTISED, MODES };

static bool all_reduces(uint32_t kind)
{
	return kind < PAIR_ALL_REDUCES || kind >= PAIR_ONE_SHOT;
}

/* Of an all-reduce. */
static uint32_t mode_of(uint32_t kind)
{
	return kind < PAIR_ALL_REDUCES ? kind % MODES : kind - (kind < PAIR_LANES ? PAIR_ONE_SHOT : PAIR_LANES);
}

bool kind_is_in_place(uint32_t kind)
{
	return all_reduces(kind) ? mode_of(kind) != OUT_OF_PLACE : kind == PAIR_BROADCAST;
}

bool kind_restores(uint32_t kind)
{
	return !all_reduces(kind) || mode_of(kind) != IN_PLACE;
}

bool kind_is_quantised(uint32_t kind)
{
	return all_reduces(kind) && mode_of(kind) == QUANTISED;
}

uint64_t pair_output_count(int side, uint32_t kind, uint64_t count)
{
	if (kind == PAIR_ALL_GATHER)
		return 2 * count;
	return kind == PAIR_REDUCE_SCATTER ? count / 2 + (side == 1 ? count % 2 : 0) : count;
}

bool pair_result_is_right(int side, uint32_t kind, const int32_t *output, uint64_t count,
			  int32_t (*value)(int side, uint64_t seed, size_t i), uint64_t seed)
{
	uint64_t outputs = pair_output_count(side, kind, count);
	uint64_t begin = kind == PAIR_REDUCE_SCATTER && side == 0 ? count - outputs : 0;
	for (uint64_t i = 0; i < outputs; i++) {
		int32_t expected;
		if (kind == PAIR_ALL_GATHER)
			expected = value(i < count, seed, i % count);
		else if (kind == PAIR_BROADCAST)
			expected = value(1, seed, i);
		else
			expected = (int32_t)((uint32_t)value(0, seed, begin + i) + (uint32_t)value(1, seed, begin + i));
		if (output[i] != expected)
			return false;
	}
	return true;
}

static uint8_t peers[2 * ZP_PEER_ID_BYTES]; /* in order of rank */
static const uint32_t owners[2] = {1, 0};
static const uint32_t parents[2][2] = {{0, 0}, {1, 1}};
static zp_lane lanes[3];

uint64_t pair_lane_elements(uint32_t lane, uint64_t count)
{
	return lane == 0 ? count / 4 : lane == 1 ? count - count / 4 : 0;
}

zp_reduce_plan pair_plan(int side, uint64_t attempt, uint32_t kind, void *input, void *output, uint64_t count)
{
	pair_id(0, peers);
	pair_id(1, peers + ZP_PEER_ID_BYTES);
	bool quantised = kind_is_quantised(kind);
	bool in_lanes = kind >= PAIR_LANES, direct = in_lanes || (kind < PAIR_ALL_REDUCES && kind / MODES);
	for (uint32_t i = 0; i < 3; i++)
		lanes[i] = (zp_lane){pair_lane_elements(i, count), parents[i % 2]};
	return (zp_reduce_plan){.attempt = attempt,
				.kind = all_reduces(kind) ? ZP_ALL_REDUCE : ZP_BROADCAST + (kind - PAIR_BROADCAST),
				.owners = all_reduces(kind) ? NULL : owners,
				.lanes = in_lanes ? lanes : NULL,
				.lane_count = in_lanes ? 3 : 0,
				.dtype = quantised ? ZP_FLOAT : ZP_INT32,
				.op = ZP_SUM,
				.quantization = quantised ? ZP_QUANTIZE_MIN_MAX : ZP_QUANTIZE_NONE,
				.block_elements = 64,
				.algorithm = direct			 ? ZP_DIRECT
					     : kind >= PAIR_ONE_SHOT ? ZP_ONE_SHOT
								     : ZP_RING,
				.world_size = 2,
				.rank = (uint32_t)side,
				.frame_bytes = 512,
				.count = count,
				.peers = peers,
				.input = input,
				.output = output,
				.restore = kind_restores(kind)};
}

void event_await(zp_engine *engine)
{
	struct pollfd fd = {.fd = zp_engine_fd(engine), .events = POLLIN};
	int ready;
	do
		ready = poll(&fd, 1, PAIR_WAIT_MS);
	while (ready < 0 && errno == EINTR); /* A fuzzer has timers. */
	CHECK(ready == 1);
}

static size_t pages_bytes(size_t bytes)
{
	return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static uint8_t *first_page(uint8_t *memory, size_t bytes)
{
	return memory + bytes - pages_bytes(bytes);
}

uint8_t *guarded_new(size_t bytes)
{
	size_t whole = pages_bytes(bytes) + 2 * PAGE_BYTES;
	uint8_t *memory = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	memory += whole - PAGE_BYTES - bytes;
	if (bytes) /* The mprotect() of qemu fails for none. */
		guarded_unlock(memory, bytes);
	return memory;
}

void guarded_lock(uint8_t *memory, size_t bytes)
{
	CHECK(mprotect(first_page(memory, bytes), pages_bytes(bytes), PROT_NONE) == 0);
}

void guarded_unlock(uint8_t *memory, size_t bytes)
{
	CHECK(mprotect(first_page(memory, bytes), pages_bytes(bytes), PROT_READ | PROT_WRITE) == 0);
}

void guarded_free(uint8_t *memory, size_t bytes)
{
	CHECK(munmap(first_page(memory, bytes) - PAGE_BYTES, pages_bytes(bytes) + 2 * PAGE_BYTES) == 0);
}

static int entries(const char *path)
{
	DIR *directory = opendir(path);
	CHECK(directory);
	int count = 0;
	while (readdir(directory))
		count++;
	closedir(directory);
	return count - 2; /* "." and ".." */
}

int open_fds(void)
{
	return entries("/proc/self/fd") - 1; /* The directory itself was open. */
}

int fds_but_memory(void)
{
	DIR *directory = opendir("/proc/self/fd");
	CHECK(directory);
	int count = 0;
	for (const struct dirent *entry; (entry = readdir(directory));) {
		char target[64];
		ssize_t n = readlinkat(dirfd(directory), entry->d_name, target, sizeof target);
		bool is_memory = n >= 7 && memcmp(target, "/memfd:", 7) == 0;
		count += n > 0 && !is_memory; /* "." and ".." are no links; one may have been closed since. */
	}
	closedir(directory);
	return count - 1; /* The directory itself was open. */
}

int threads_now(void)
{
	return entries("/proc/self/task");
}

void threads_await(int count)
{
	for (int ms = 0; threads_now() != count; ms++) {
		CHECK(ms < PAIR_WAIT_MS);
		poll(NULL, 0, 1);
	}
}

static void *nothing(void *argument)
{
	return argument;
}

void first_thread(void)
{
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, nothing, NULL) == 0 && pthread_join(thread, NULL) == 0);
}
