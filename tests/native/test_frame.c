/* Frame headers: round trip, arrival in pieces, hostile bytes. And the layout of a tensor. */
#include <errno.h>
#include <string.h>

#include "check.h"
#include "checksum.h"
#include "frame.h"
#include "layout.h"

static const zp__frame sample = {.kind = ZP__ALL_GATHER,
				 .id = 0x0123456789abcdefu,
				 .chunk = 0xfedcba98u,
				 .offset = 0x1122334455667788u,
				 .length = 0x99aabbccu,
				 .checksum = 0xdeadbeefu};

static int same(const zp__frame *a, const zp__frame *b)
{
	return a->kind == b->kind && a->id == b->id && a->chunk == b->chunk && a->offset == b->offset &&
	       a->length == b->length && a->checksum == b->checksum;
}

static void test_bytes_on_the_wire(void)
{
	static const uint8_t expected[36] = {'Z',  'P',	 'F',  '2',  2,	   0,	 0,    0,    0x01, 0x23, 0x45, 0x67,
					     0x89, 0xab, 0xcd, 0xef, 0xfe, 0xdc, 0xba, 0x98, 0x99, 0xaa, 0xbb, 0xcc,
					     0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0xde, 0xad, 0xbe, 0xef};
	uint8_t header[ZP__HEADER_BYTES];
	zp__frame_encode(header, &sample);
	CHECK(memcmp(header, expected, sizeof expected) == 0);
}

static void test_pieces(void)
{
	uint8_t header[2 * ZP__HEADER_BYTES];
	zp__frame second = sample;
	second.kind = ZP__MESSAGE;
	second.id = 7;
	zp__frame_encode(header, &sample);
	zp__frame_encode(header + ZP__HEADER_BYTES, &second);
	for (size_t piece = 1; piece <= ZP__HEADER_BYTES; piece++) {
		zp__frame_parser parser = {.have = 0};
		zp__frame got[2];
		int complete = 0;
		for (size_t at = 0; at < sizeof header;) {
			uint8_t *space;
			size_t n = zp__frame_missing(&parser, &space);
			CHECK(n > 0);
			n = n < piece ? n : piece;
			memcpy(space, header + at, n);
			at += n;
			int rc = zp__frame_advance(&parser, n, &got[complete]);
			CHECK(rc == (at % ZP__HEADER_BYTES == 0));
			complete += rc;
		}
		CHECK(complete == 2 && same(&got[0], &sample) && same(&got[1], &second));
	}
}

static void test_every_flipped_bit_is_seen(void)
{
	uint8_t header[ZP__HEADER_BYTES];
	zp__frame_encode(header, &sample);
	for (size_t bit = 0; bit < 8 * ZP__HEADER_BYTES; bit++) {
		zp__frame frame = {.kind = 99};
		header[bit / 8] ^= (uint8_t)(1u << bit % 8);
		int rc = zp__frame_decode(header, &frame);
		CHECK(rc == (bit < 32 ? -EPROTO : -EBADMSG));
		CHECK(frame.kind == 99);
		header[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
}

static void checksum_set(uint8_t header[ZP__HEADER_BYTES])
{
	uint64_t checksum = zp__checksum_of(header, 36);
	for (int i = 0; i < 4; i++)
		header[36 + i] = (uint8_t)(checksum >> (24 - 8 * i));
}

static void test_nonsense_with_a_right_checksum_is_refused(void)
{
	for (int kind = 0; kind < 256; kind++) {
		uint8_t header[ZP__HEADER_BYTES];
		zp__frame frame;
		zp__frame_encode(header, &sample);
		header[4] = (uint8_t)kind;
		checksum_set(header);
		CHECK(zp__frame_decode(header, &frame) == (kind >= 1 && kind <= ZP__STARTED ? 0 : -EPROTO));
	}
	for (int reserved = 5; reserved < 8; reserved++) {
		uint8_t header[ZP__HEADER_BYTES];
		zp__frame frame;
		zp__frame_encode(header, &sample);
		header[reserved] = 1;
		checksum_set(header);
		CHECK(zp__frame_decode(header, &frame) == -EPROTO);
	}
}

/* Slots tile the tensor without gap or overlap, whatever the numbers. */
static void test_layout(void)
{
	for (uint32_t world = 2; world <= 9; world++)
		for (uint64_t count = 1; count <= 60; count++)
			for (uint64_t frame = 1; frame <= 12; frame++) {
				zp__layout l = {.world_size = world, .frame_elements = frame, .itemsize = 4};
				l.chunk_elements = count / world;
				l.long_chunks = count % world;
				l.long_slots = (l.chunk_elements + frame) / frame;
				l.short_slots = (l.chunk_elements + frame - 1) / frame;
				l.slot_count = l.long_chunks * l.long_slots + (world - l.long_chunks) * l.short_slots;
				uint64_t position = 0;
				for (uint64_t slot = 0; slot < l.slot_count; slot++) {
					zp__span span = zp__slot_span(&l, slot);
					CHECK(span.position == position && span.chunk < world);
					CHECK(span.elements >= 1 && span.elements <= frame);
					CHECK(zp__chunk_first_slot(&l, span.chunk) + span.offset / frame == slot);
					position += span.elements;
				}
				CHECK(position == count);
			}
}

int main(void)
{
	test_bytes_on_the_wire();
	test_pieces();
	test_every_flipped_bit_is_seen();
	test_nonsense_with_a_right_checksum_is_refused();
	test_layout();
	return 0;
}
