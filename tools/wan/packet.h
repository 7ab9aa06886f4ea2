/* IPv4 packets as a TUN device with IFF_VNET_HDR gives and takes them: TCP may come in super-packets of many segments.
 *
 * One thread. A packet belongs to whoever has the pointer, until it is handed on or dropped. */
#ifndef WAN_PACKET_H
#define WAN_PACKET_H

#include <linux/virtio_net.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PACKET_PREFIX_BYTES ((uint32_t)sizeof(struct virtio_net_hdr))
#define PACKET_BYTES_MAX (PACKET_PREFIX_BYTES + 65536u)
#define PACKET_COPIED_BYTES_MAX 16384u /* a shorter one is copied out of the buffer that it was read to */

struct packet {
	struct packet *next;
	uint64_t time_ns;	/* when it reached its present stage; in a delay line: when it leaves */
	uint32_t bytes;		/* of data */
	uint32_t wire_bytes;	/* size of its segments on the wire, with an IP header each */
	uint16_t segments;
	uint16_t segment_bytes; /* payload of each segment but the last; 0: one segment */
	uint16_t header_bytes;	/* IP and TCP; 0: one segment */
	uint8_t size_class;
	uint8_t from, to; /* hosts */
	uint8_t unused;
	unsigned char data[]; /* the prefix, then the packet */
};
_Static_assert((offsetof(struct packet, data) + sizeof(struct virtio_net_hdr)) % 4 == 0, "IP headers are aligned");

/* A packet with space for `bytes` of data; NULL: no memory. */
struct packet *packet_new(uint32_t bytes);
void packet_drop(struct packet *packet);
/* Bytes of all packets that are not dropped: now, and the maximum since packet_memory_reset(). */
uint64_t packet_memory(void);
uint64_t packet_memory_max(void);
void packet_memory_reset(void);

/* Sets all fields but `from` and `to` by the headers. False: not a complete IPv4 packet. */
bool packet_parse(struct packet *packet);
/* Its destination address, in the host's byte order. */
uint32_t packet_destination(const struct packet *packet);
/* A new packet of segments first .. first + count - 1, with headers as a network card would make them; NULL: no memory. */
struct packet *packet_slice(const struct packet *packet, unsigned first, unsigned count);

#endif
