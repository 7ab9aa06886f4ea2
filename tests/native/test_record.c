/* Sealed connections by themselves: what goes in comes out, and nothing else does, whatever happens on the way. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "bounds.h"
#include "check.h"
#include "cipher.h"
#include "link.h"
#include "record.h"

enum { CAPTURE_BYTES_MAX = 8192, TEXT_BYTES = 600, RECORDS = 4, UNTOUCHED = 0xa5 };

static void end_open(zp__connection *end, int fd, const zp_aead *cipher)
{
	*end = (zp__connection){.fd = fd, .readable = true, .writable = true};
	CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0);
	CHECK(zp__record_layer_open(cipher, &end->records) == 0);
}

static void end_close(zp__connection *end)
{
	zp__record_layer_close(end->records);
	if (end->fd >= 0)
		close(end->fd);
}

static void pair_open(zp__connection *one, zp__connection *other, int buffer_bytes)
{
	int fds[2];
	zp_aead near = cipher_aead(1, 2), far = cipher_aead(2, 1);
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	if (buffer_bytes)
		CHECK(setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes) == 0);
	end_open(one, fds[0], &near);
	end_open(other, fds[1], &far);
}

static uint8_t byte_at(uint64_t place)
{
	return (uint8_t)(place * 2654435761u >> 13);
}

static void fill(uint8_t *to, uint64_t place, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		to[i] = byte_at(place + i);
}

static void compare(const uint8_t *got, uint64_t place, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		CHECK(got[i] == byte_at(place + i));
}

/* Pieces of random sizes, over a socket that is mostly full, with ends that stop at random places. */
static void test_stream(uint64_t seed, size_t piece_bytes_max, int buffer_bytes)
{
	enum { TOTAL = 3 << 20, PIECES = 3 };
	zp__connection one, other;
	pair_open(&one, &other, buffer_bytes);
	uint8_t *buffers[2] = {malloc(PIECES * piece_bytes_max), malloc(PIECES * piece_bytes_max)};
	CHECK(buffers[0] && buffers[1]);
	uint64_t sent = 0, got = 0;
	while (got < TOTAL) {
		for (int way = 0; way < 2; way++) {
			struct iovec iov[PIECES];
			int count = 1 + (int)(random_next(&seed) % PIECES);
			size_t wanted = 0;
			for (int i = 0; i < count; i++) {
				size_t bytes = random_next(&seed) % piece_bytes_max;
				iov[i] = (struct iovec){buffers[way] + wanted, bytes};
				wanted += bytes;
			}
			one.writable = other.readable = true;
			if (way == 0) {
				fill(buffers[0], sent, wanted);
				ssize_t n = zp__record_send(&one, iov, count);
				CHECK(n >= 0 && (size_t)n <= wanted && ((size_t)n == wanted || !one.writable));
				sent += (uint64_t)n;
			} else {
				ssize_t n = zp__record_receive(&other, iov, count);
				CHECK(n >= 0 && (size_t)n <= wanted);
				compare(buffers[1], got, (size_t)n);
				got += (uint64_t)n;
			}
		}
	}
	CHECK(got <= sent);
	free(buffers[0]);
	free(buffers[1]);
	end_close(&one);
	end_close(&other);
}

/* More records than a key serves for, in both directions. */
static void test_keys_are_replaced(void)
{
	enum { TEXTS = 200000, AT_A_TIME = 50 };
	zp__connection ends[2];
	pair_open(&ends[0], &ends[1], 0);
	for (uint32_t i = 0; i < TEXTS; i++) {
		int from = i / AT_A_TIME % 2;
		uint8_t byte = byte_at(i), got[AT_A_TIME];
		struct iovec iov = {&byte, 1};
		CHECK(zp__record_send(&ends[from], &iov, 1) == 1 && zp__record_flush(&ends[from]) == 1);
		if (i % AT_A_TIME != AT_A_TIME - 1)
			continue;
		struct iovec all = {got, AT_A_TIME};
		ends[!from].readable = true;
		CHECK(zp__record_receive(&ends[!from], &all, 1) == AT_A_TIME);
		compare(got, i + 1 - AT_A_TIME, AT_A_TIME);
	}
	end_close(&ends[0]);
	end_close(&ends[1]);
}

/* --- Somebody on the path ----------------------------------------------------------------------------------------- */

typedef struct {
	uint8_t bytes[CAPTURE_BYTES_MAX];
	size_t begins[RECORDS + 1]; /* of the records, and the end */
} capture;

/* What RECORDS texts of TEXT_BYTES look like on the wire, encrypted with `cipher`. */
static void wire_capture(capture *wire, const zp_aead *cipher)
{
	int fds[2];
	zp__connection one;
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	end_open(&one, fds[0], cipher);
	size_t have = 0;
	for (int i = 0; i < RECORDS; i++) {
		uint8_t text[TEXT_BYTES];
		fill(text, (uint64_t)i * TEXT_BYTES, TEXT_BYTES);
		struct iovec iov[2] = {{text, ZP__HEADER_BYTES}, {text + ZP__HEADER_BYTES, TEXT_BYTES - ZP__HEADER_BYTES}};
		wire->begins[i] = have;
		CHECK(zp__record_send(&one, iov, 2) == TEXT_BYTES);
		ssize_t n = recv(fds[1], wire->bytes + have, CAPTURE_BYTES_MAX - have, MSG_DONTWAIT);
		CHECK(n == (ssize_t)(ZP__RECORD_PREFIX_BYTES + TEXT_BYTES + cipher->tag_bytes));
		have += (size_t)n;
	}
	wire->begins[RECORDS] = have;
	end_close(&one);
	close(fds[1]);
}

/* Gives these bytes to an end that has `cipher`, then closes the stream. What it takes must be the first `expected`
 * bytes of the text, and nothing else may be written; its last word is returned. */
static int wire_deliver(const uint8_t *bytes, size_t count, const zp_aead *cipher, size_t expected)
{
	static uint8_t got[2 * RECORDS * TEXT_BYTES];
	int fds[2], status = 0;
	zp__connection other;
	CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	end_open(&other, fds[1], cipher);
	CHECK(send(fds[0], bytes, count, 0) == (ssize_t)count);
	close(fds[0]);
	memset(got, UNTOUCHED, sizeof got);
	size_t have = 0;
	while (status == 0) {
		struct iovec iov = {got + have, sizeof got - have};
		other.readable = true;
		ssize_t n = zp__record_receive(&other, &iov, 1);
		if (n < 0)
			status = (int)n;
		else
			have += (size_t)n;
	}
	struct iovec again = {got + have, sizeof got - have};
	CHECK(zp__record_receive(&other, &again, 1) == status); /* An error stays. */
	CHECK(have == expected);
	compare(got, 0, have);
	for (size_t i = have; i < sizeof got; i++)
		CHECK(got[i] == UNTOUCHED);
	end_close(&other);
	return status;
}

static size_t whole_records(const capture *wire, size_t bytes)
{
	size_t records = 0;
	while (records < RECORDS && wire->begins[records + 1] <= bytes)
		records++;
	return records;
}

static void test_every_bit(const capture *wire, const zp_aead *far)
{
	uint8_t bytes[CAPTURE_BYTES_MAX];
	size_t count = wire->begins[RECORDS];
	for (size_t place = 0; place < wire->begins[2]; place++) {
		for (int bit = 0; bit < 8; bit++) {
			memcpy(bytes, wire->bytes, count);
			bytes[place] ^= (uint8_t)(1 << bit);
			int status = wire_deliver(bytes, count, far, whole_records(wire, place) * TEXT_BYTES);
			/* A length that grew may wait for more than there is. */
			bool is_length = place - wire->begins[place >= wire->begins[1]] < ZP__RECORD_PREFIX_BYTES;
			CHECK(status == -EBADMSG || (is_length && status == -ECONNRESET));
		}
	}
}

static void test_truncation(const capture *wire, const zp_aead *far)
{
	for (size_t count = 0; count <= wire->begins[RECORDS]; count++)
		CHECK(wire_deliver(wire->bytes, count, far, whole_records(wire, count) * TEXT_BYTES) == -ECONNRESET);
}

/* Records in another order: repeated, left out, exchanged. */
static void test_orders(const capture *wire, const zp_aead *far)
{
	for (int code = 0; code < RECORDS * RECORDS * RECORDS; code++) {
		int order[3] = {code % RECORDS, code / RECORDS % RECORDS, code / RECORDS / RECORDS};
		uint8_t bytes[CAPTURE_BYTES_MAX];
		size_t count = 0, right = 0;
		while (right < 3 && order[right] == (int)right)
			right++;
		for (int i = 0; i < 3; i++) {
			size_t begin = wire->begins[order[i]], length = wire->begins[order[i] + 1] - begin;
			memcpy(bytes + count, wire->bytes + begin, length);
			count += length;
		}
		int status = wire_deliver(bytes, count, far, right * TEXT_BYTES);
		CHECK(status == (right == 3 ? -ECONNRESET : -EBADMSG));
	}
}

/* Records that were encrypted for others: by the end itself, by another connection, with the records of two put together. */
static void test_others(const capture *wire, const zp_aead *far)
{
	capture echo, strange;
	zp_aead third = cipher_aead(3, 4);
	wire_capture(&echo, far);
	wire_capture(&strange, &third);
	CHECK(wire_deliver(echo.bytes, echo.begins[RECORDS], far, 0) == -EBADMSG);
	CHECK(wire_deliver(strange.bytes, strange.begins[RECORDS], far, 0) == -EBADMSG);
	uint8_t bytes[CAPTURE_BYTES_MAX];
	for (int i = 1; i < RECORDS; i++) {
		size_t begin = wire->begins[i], count = wire->begins[RECORDS];
		memcpy(bytes, wire->bytes, begin);
		memcpy(bytes + begin, (i % 2 ? &strange : &echo)->bytes + begin, count - begin);
		CHECK(wire_deliver(bytes, count, far, (size_t)i * TEXT_BYTES) == -EBADMSG);
	}
}

/* Lengths that no record has. */
static void test_lengths(const zp_aead *far)
{
	uint32_t lengths[] = {0, ZP__RECORD_PLAINTEXT_BYTES + 1, 1u << 31, UINT32_MAX};
	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
		uint8_t bytes[100] = {0};
		zp__record_encode(bytes, lengths[i]);
		CHECK(wire_deliver(bytes, sizeof bytes, far, 0) == -EBADMSG);
	}
}

static void test_nothing_shows(const capture *wire)
{
	uint8_t text[TEXT_BYTES];
	fill(text, 0, TEXT_BYTES);
	for (size_t i = 0; i + 16 <= TEXT_BYTES; i++)
		CHECK(!memmem(wire->bytes, wire->begins[1], text + i, 16));
}

static void test_arguments(void)
{
	zp__record_layer *layer;
	zp_aead good = cipher_aead(1, 2), bad;
	bad = good, bad.encrypt = NULL;
	CHECK(zp__record_layer_open(&bad, &layer) == -EINVAL);
	bad = good, bad.key_bytes = ZP_AEAD_KEY_BYTES_MAX + 1;
	CHECK(zp__record_layer_open(&bad, &layer) == -EINVAL);
	bad = good, bad.nonce_bytes = 4;
	CHECK(zp__record_layer_open(&bad, &layer) == -EINVAL);
	bad = good, bad.tag_bytes = 64;
	CHECK(zp__record_layer_open(&bad, &layer) == -EINVAL);
	zp__record_layer_close(NULL);
}

int main(void)
{
	zp_aead near = cipher_aead(1, 2), far = cipher_aead(2, 1);
	capture wire;
	wire_capture(&wire, &near);
	test_arguments();
	for (uint64_t seed = 1; seed <= 4; seed++) {
		test_stream(seed, 100, 0);
		test_stream(seed, 9000, 4096);
		test_stream(seed, 300000, seed % 2 ? 0 : 16384);
	}
	test_keys_are_replaced();
	test_every_bit(&wire, &far);
	test_truncation(&wire, &far);
	test_orders(&wire, &far);
	test_others(&wire, &far);
	test_lengths(&far);
	test_nothing_shows(&wire);
	return 0;
}
