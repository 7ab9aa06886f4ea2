/* Frame headers from any bytes, in any pieces: the parser reads nothing but them, gives the same answer however they are
 * cut, and what it accepts is encoded again to the same bytes.
 *
 * The first byte: the length of the pieces, and, in its highest bit, whether headers get a right checksum, as those of a
 * hostile peer have. */
#include <string.h>

#include "../check.h"
#include "checksum.h"
#include "frame.h"
#include "fuzz.h"

enum { HEADERS_MAX = 16 };

static void checksum_set(uint8_t header[ZP__HEADER_BYTES])
{
	uint64_t checksum = zp__checksum_of(header, ZP__HEADER_BYTES - 4);
	for (unsigned i = 0; i < 4; i++)
		header[ZP__HEADER_BYTES - 4 + i] = (uint8_t)(checksum >> (24 - 8 * i));
}

/* Parses one header in pieces. */
static int parse(const uint8_t header[ZP__HEADER_BYTES], size_t piece, zp__frame *frame)
{
	zp__frame_parser parser = {.have = 0};
	for (size_t at = 0; at < ZP__HEADER_BYTES;) {
		uint8_t *space;
		size_t n = zp__frame_missing(&parser, &space);
		CHECK(n == ZP__HEADER_BYTES - at);
		n = n < piece ? n : piece;
		memcpy(space, header + at, n);
		at += n;
		int rc = zp__frame_advance(&parser, n, frame);
		CHECK(at == ZP__HEADER_BYTES || rc == 0);
		if (at == ZP__HEADER_BYTES)
			return rc;
	}
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
	if (bytes < 1)
		return 0;
	size_t piece = data[0] % ZP__HEADER_BYTES + 1;
	bool right_checksum = data[0] & 0x80;
	for (size_t at = 1; at + ZP__HEADER_BYTES <= bytes && at < HEADERS_MAX * ZP__HEADER_BYTES; at += ZP__HEADER_BYTES) {
		uint8_t header[ZP__HEADER_BYTES], again[ZP__HEADER_BYTES];
		memcpy(header, data + at, sizeof header);
		if (right_checksum)
			checksum_set(header);
		zp__frame whole, pieces;
		memset(&whole, 0xaa, sizeof whole);
		memset(&pieces, 0xaa, sizeof pieces);
		int rc = zp__frame_decode(header, &whole);
		CHECK(parse(header, piece, &pieces) == (rc == 0 ? 1 : rc));
		CHECK(memcmp(&whole, &pieces, sizeof whole) == 0);
		if (rc == 0) {
			zp__frame_encode(again, &whole);
			CHECK(memcmp(again, header, sizeof again) == 0);
		}
	}
	return 0;
}
