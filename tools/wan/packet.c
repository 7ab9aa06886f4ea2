/* Packets: the pool, parsing of headers, and splitting of super-packets. The pool never shrinks: it is as large as the
 * maximum that was in flight. */
#define _GNU_SOURCE
#include "packet.h"

#include <arpa/inet.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>

#define SIZE_CLASSES 4
#define IP_HEADER_BYTES_MIN 20u
#define TCP_HEADER_BYTES_MIN 20u
#define TCP_CWR 2u /* in tcphdr.res2: the sender has reduced its window */

static const uint32_t class_bytes[SIZE_CLASSES] = {256, 2048, PACKET_COPIED_BYTES_MAX, PACKET_BYTES_MAX};
static struct packet *pool[SIZE_CLASSES];
static uint64_t memory_now, memory_max;

struct packet *packet_new(uint32_t bytes)
{
	uint8_t size_class = 0;
	while (class_bytes[size_class] < bytes)
		size_class++;
	struct packet *packet = pool[size_class];
	if (packet)
		pool[size_class] = packet->next;
	else if (!(packet = malloc(sizeof *packet + class_bytes[size_class])))
		return NULL;
	packet->next = NULL;
	packet->size_class = size_class;
	memory_now += class_bytes[size_class];
	if (memory_now > memory_max)
		memory_max = memory_now;
	return packet;
}

void packet_drop(struct packet *packet)
{
	memory_now -= class_bytes[packet->size_class];
	packet->next = pool[packet->size_class];
	pool[packet->size_class] = packet;
}

uint64_t packet_memory(void)
{
	return memory_now;
}

uint64_t packet_memory_max(void)
{
	return memory_max;
}

void packet_memory_reset(void)
{
	memory_max = memory_now;
}

static struct iphdr *ip_header(const struct packet *packet)
{
	return (struct iphdr *)(packet->data + PACKET_PREFIX_BYTES);
}

uint32_t packet_destination(const struct packet *packet)
{
	return ntohl(ip_header(packet)->daddr);
}

bool packet_parse(struct packet *packet)
{
	const struct virtio_net_hdr *prefix = (const struct virtio_net_hdr *)packet->data;
	const struct iphdr *ip = ip_header(packet);
	if (packet->bytes < PACKET_PREFIX_BYTES + IP_HEADER_BYTES_MIN || ip->version != 4 || ip->ihl < 5)
		return false;
	packet->segments = 1;
	packet->segment_bytes = packet->header_bytes = 0;
	packet->wire_bytes = packet->bytes - PACKET_PREFIX_BYTES;
	if ((prefix->gso_type & ~VIRTIO_NET_HDR_GSO_ECN) != VIRTIO_NET_HDR_GSO_TCPV4 || prefix->gso_size == 0)
		return true;
	uint32_t ip_bytes = ip->ihl * 4u;
	if (packet->wire_bytes < ip_bytes + TCP_HEADER_BYTES_MIN)
		return false;
	uint32_t header_bytes = ip_bytes + ((const struct tcphdr *)((const unsigned char *)ip + ip_bytes))->doff * 4u;
	if (header_bytes < ip_bytes + TCP_HEADER_BYTES_MIN || packet->wire_bytes <= header_bytes)
		return false;
	uint32_t payload = packet->wire_bytes - header_bytes;
	packet->header_bytes = (uint16_t)header_bytes;
	packet->segment_bytes = prefix->gso_size;
	packet->segments = (uint16_t)((payload + prefix->gso_size - 1) / prefix->gso_size);
	packet->wire_bytes = payload + packet->segments * header_bytes;
	return true;
}

static uint32_t sum16(const void *bytes, uint32_t count)
{
	uint32_t sum = 0;
	uint16_t word;
	for (uint32_t i = 0; i + 1 < count; i += 2) {
		memcpy(&word, (const char *)bytes + i, 2);
		sum += word;
	}
	return sum;
}

static uint16_t fold(uint32_t sum)
{
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return (uint16_t)sum;
}

/* Adapts the headers of a slice: lengths, sequence number, flags and checksums. The TCP checksum is CHECKSUM_PARTIAL, the
 * sum of the pseudo header: the prefix tells the receiving kernel that the rest is not computed. */
static void mend_headers(struct packet *slice, const struct packet *whole, unsigned first, uint32_t payload)
{
	struct virtio_net_hdr *prefix = (struct virtio_net_hdr *)slice->data;
	struct iphdr *ip = ip_header(slice);
	uint32_t ip_bytes = ip->ihl * 4u;
	struct tcphdr *tcp = (struct tcphdr *)((unsigned char *)ip + ip_bytes);
	uint16_t tcp_bytes = htons((uint16_t)(slice->header_bytes - ip_bytes + payload));
	if (slice->segments == 1) {
		prefix->gso_type = VIRTIO_NET_HDR_GSO_NONE;
		prefix->gso_size = 0;
	}
	ip->tot_len = htons((uint16_t)(slice->header_bytes + payload));
	ip->id = htons((uint16_t)(ntohs(ip->id) + first));
	ip->check = 0;
	ip->check = (uint16_t)~fold(sum16(ip, ip_bytes));
	tcp->seq = htonl(ntohl(tcp->seq) + first * slice->segment_bytes);
	if (first + slice->segments < whole->segments)
		tcp->fin = tcp->psh = 0;
	if (first > 0)
		tcp->res2 &= (uint16_t)~TCP_CWR; /* It goes with the first segment only. */
	tcp->check = fold(sum16(&ip->saddr, 8) + htons(IPPROTO_TCP) + tcp_bytes);
}

struct packet *packet_slice(const struct packet *packet, unsigned first, unsigned count)
{
	uint32_t begin = first * packet->segment_bytes;
	uint32_t payload = count * packet->segment_bytes;
	uint32_t left = packet->bytes - PACKET_PREFIX_BYTES - packet->header_bytes - begin;
	uint32_t prefix_bytes = PACKET_PREFIX_BYTES + packet->header_bytes;
	if (payload > left)
		payload = left;
	struct packet *slice = packet_new(prefix_bytes + payload);
	if (!slice)
		return NULL;
	slice->time_ns = packet->time_ns;
	slice->from = packet->from;
	slice->to = packet->to;
	slice->header_bytes = packet->header_bytes;
	slice->segment_bytes = packet->segment_bytes;
	slice->segments = (uint16_t)count;
	slice->bytes = prefix_bytes + payload;
	slice->wire_bytes = payload + count * packet->header_bytes;
	memcpy(slice->data, packet->data, prefix_bytes);
	memcpy(slice->data + prefix_bytes, packet->data + prefix_bytes + begin, payload);
	mend_headers(slice, packet, first, payload);
	return slice;
}
