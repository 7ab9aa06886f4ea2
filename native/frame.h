/* Frame headers. Bodies are tensor elements in the byte order of the hosts, which must be little-endian. */
#ifndef ZP_FRAME_H
#define ZP_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ZP__HEADER_BYTES 40u

enum zp__frame_kind {
	ZP__REDUCE_SCATTER = 1,
	ZP__ALL_GATHER = 2,
	ZP__MESSAGE = 3,
	/* Acknowledge frames of any connection of the same link. `chunk` is the index of that connection, `id` its
	 * generation, `offset` the number of complete frames received on it. No body. */
	ZP__FINAL_ACK = 4, /* the receiver has closed the connection: the number is final */
	ZP__ACK = 5,	   /* the number so far */
	ZP__OPENED = 6,	   /* `id` is the greatest channel that the sender knows. No body */
	ZP__STARTED = 7	   /* the sender has started the attempt `id`. No body */
};

typedef struct {
	uint8_t kind;	 /* enum zp__frame_kind */
	uint64_t id;	 /* attempt, channel, or generation (acknowledgements) */
	uint32_t chunk;	 /* 0 for messages */
	uint64_t offset; /* elements from the start of the chunk; 0 for messages */
	uint32_t length; /* bytes of the body */
	uint32_t checksum; /* of the body: the lower half */
} zp__frame;

/* What to do with an incoming frame. ADMIT: receive its body; PARK: do not receive it yet; DROP: read and drop it;
 * VIOLATION: lose its link; NO_MEMORY: lose its connection. */
enum zp__verdict { ZP__ADMIT, ZP__PARK, ZP__DROP, ZP__VIOLATION, ZP__NO_MEMORY };

/* The prefix of a record of an encrypted connection: the size of its plaintext in bytes. */
#define ZP__RECORD_PREFIX_BYTES 4u
void zp__record_encode(uint8_t prefix[ZP__RECORD_PREFIX_BYTES], uint32_t bytes);
uint32_t zp__record_decode(const uint8_t prefix[ZP__RECORD_PREFIX_BYTES]);

/* A header that arrives in pieces. */
typedef struct {
	uint8_t bytes[ZP__HEADER_BYTES];
	uint32_t have;
} zp__frame_parser;

void zp__frame_encode(uint8_t header[ZP__HEADER_BYTES], const zp__frame *frame);

/* Decodes a complete header. -EPROTO: not a header of this version; -EBADMSG: damaged. Sets `frame` on success only. */
int zp__frame_decode(const uint8_t header[ZP__HEADER_BYTES], zp__frame *frame);

/* Sets `*space` to where the next bytes of the header go. Returns how many are missing. */
size_t zp__frame_missing(zp__frame_parser *parser, uint8_t **space);

/* Accepts `bytes` that were written to that space. 1: the header is complete, `frame` is set, and the parser is ready
 * for the next one; 0: bytes are missing; -errno of zp__frame_decode(). */
int zp__frame_advance(zp__frame_parser *parser, size_t bytes, zp__frame *frame);

#endif
