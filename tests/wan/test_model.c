/* The model of the emulator of wide-area networks, with a clock of the test's own: all times are exact. */
#include <arpa/inet.h>
#include <math.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../native/check.h"
#include "model.h"

#define MS 1000000u
#define HEADERS 40u
#define SEGMENT 1448u
#define RECORDS_MAX 200000u

struct record {
	uint64_t due_ns;
	uint32_t number; /* of the packet */
	uint32_t segments, wire_bytes;
};

static struct record records[RECORDS_MAX];
static unsigned record_count;
static unsigned char payload[1 << 17];
static uint32_t payload_bytes;
static bool pieces_are_right;

/* The ones' complement sum of an IP header: 0xffff if its checksum is right. */
static uint16_t ip_sum(const struct iphdr *ip)
{
	uint32_t sum = 0;
	for (unsigned i = 0; i < 10; i++)
		sum += ((const uint16_t *)ip)[i];
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return (uint16_t)sum;
}

/* Gathers the payload of super-packets, and checks the headers of each piece. */
static void check_piece(const struct packet *packet)
{
	const struct virtio_net_hdr *prefix = (const struct virtio_net_hdr *)packet->data;
	const struct iphdr *ip = (const struct iphdr *)(packet->data + PACKET_PREFIX_BYTES);
	const struct tcphdr *tcp = (const struct tcphdr *)(ip + 1);
	uint32_t bytes = packet->bytes - PACKET_PREFIX_BYTES - HEADERS;
	bool last = payload_bytes + bytes == 20000;
	pieces_are_right = pieces_are_right && ip_sum(ip) == 0xffff && ntohs(ip->tot_len) == HEADERS + bytes &&
			   ntohl(tcp->seq) == 0xfffffff0u + payload_bytes && tcp->psh == last && tcp->fin == last &&
			   tcp->ack == 1 && ((tcp->res2 & 2) != 0) == (payload_bytes == 0) &&
			   prefix->gso_size == (packet->segments > 1 ? SEGMENT : 0);
	memcpy(payload + payload_bytes, packet->data + PACKET_PREFIX_BYTES + HEADERS, bytes);
	payload_bytes += bytes;
}

static void record(const struct packet *packet, uint64_t due_ns)
{
	CHECK(record_count < RECORDS_MAX);
	struct record *next = &records[record_count++];
	*next = (struct record){.due_ns = due_ns, .segments = packet->segments, .wire_bytes = packet->wire_bytes};
	if (packet->header_bytes)
		check_piece(packet);
	else
		memcpy(&next->number, packet->data + PACKET_PREFIX_BYTES + 20, 4);
}

static struct settings begin(uint64_t seed)
{
	static struct settings settings;
	memset(&settings, 0, sizeof settings);
	settings.burst_ns = 250000;
	settings.memory_bytes = 1e9;
	for (unsigned i = 0; i < 4; i++)
		for (unsigned j = 0; j < 4; j++)
			settings.paths[i][j] = (struct path_settings){
				.jitter_period_ns = 20 * MS, .loss_run = 1, .queue_bytes = 1e8};
	record_count = payload_bytes = 0;
	pieces_are_right = true;
	CHECK(model_open(2, seed, record) == 0);
	model_configure(&settings, 0);
	model_reset_counts();
	packet_memory_reset();
	return settings;
}

/* A datagram of so many bytes on the wire, which carries its number. */
static void enter(uint32_t number, uint32_t wire_bytes, uint64_t now_ns)
{
	struct packet *packet = packet_new(PACKET_PREFIX_BYTES + wire_bytes);
	CHECK(packet);
	packet->bytes = PACKET_PREFIX_BYTES + wire_bytes;
	memset(packet->data, 0, packet->bytes);
	struct iphdr *ip = (struct iphdr *)(packet->data + PACKET_PREFIX_BYTES);
	ip->version = 4;
	ip->ihl = 5;
	ip->daddr = htonl(0x0a4d0101);
	memcpy(ip + 1, &number, 4);
	CHECK(packet_parse(packet) && packet->wire_bytes == wire_bytes);
	CHECK(packet_destination(packet) == 0x0a4d0101);
	packet->from = 0;
	packet->to = 1;
	model_enter(packet, now_ns);
}

/* A TCP super-packet of 20,000 bytes: 13 full segments and one of 1176. */
static void enter_super_packet(uint64_t now_ns)
{
	uint32_t bytes = PACKET_PREFIX_BYTES + HEADERS + 20000;
	struct packet *packet = packet_new(bytes);
	CHECK(packet);
	packet->bytes = bytes;
	memset(packet->data, 0, PACKET_PREFIX_BYTES + HEADERS);
	struct virtio_net_hdr *prefix = (struct virtio_net_hdr *)packet->data;
	prefix->gso_type = VIRTIO_NET_HDR_GSO_TCPV4;
	prefix->gso_size = SEGMENT;
	struct iphdr *ip = (struct iphdr *)(packet->data + PACKET_PREFIX_BYTES);
	ip->version = 4;
	ip->ihl = 5;
	ip->saddr = htonl(0x0a4d0001);
	ip->daddr = htonl(0x0a4d0101);
	ip->protocol = IPPROTO_TCP;
	ip->tot_len = htons(HEADERS + 20000);
	ip->check = (uint16_t)~ip_sum(ip);
	struct tcphdr *tcp = (struct tcphdr *)(ip + 1);
	tcp->doff = 5;
	tcp->ack = tcp->psh = tcp->fin = 1;
	tcp->res2 = 2;
	tcp->seq = htonl(0xfffffff0u); /* It wraps within the packet. */
	for (unsigned i = 0; i < 20000; i++)
		packet->data[PACKET_PREFIX_BYTES + HEADERS + i] = (unsigned char)(i * 7 + i / 256);
	CHECK(packet_parse(packet) && packet->segments == 14 && packet->wire_bytes == 20000 + 14 * HEADERS);
	packet->from = 0;
	packet->to = 1;
	model_enter(packet, now_ns);
}

static void run_until(uint64_t now_ns)
{
	uint64_t due_ns;
	while (model_step(now_ns, &due_ns))
		;
}

static void end(void)
{
	run_until(UINT64_MAX - 1);
	CHECK(packet_memory() == 0);
	model_close();
}

static void test_delay_is_exact(void)
{
	struct settings settings = begin(1);
	settings.paths[0][1].delay_ns = 50 * MS;
	model_configure(&settings, 0);
	for (uint32_t i = 0; i < 10; i++)
		enter(i, 1000, i * MS);
	run_until(50 * MS - 1);
	CHECK(record_count == 0);
	run_until(UINT64_MAX - 1);
	CHECK(record_count == 10);
	for (uint32_t i = 0; i < 10; i++)
		CHECK(records[i].number == i && records[i].due_ns == (50 + i) * MS);
	end();
}

static void test_rate_is_exact_and_changes_at_once(void)
{
	struct settings settings = begin(1);
	settings.paths[0][1].rate = 12e6; /* 1500 bytes a millisecond */
	model_configure(&settings, 0);
	for (uint32_t i = 0; i < 100; i++)
		enter(i, 1500, 0);
	run_until(50 * MS);
	CHECK(record_count == 50);
	settings.paths[0][1].rate = 120e6;
	model_configure(&settings, 50 * MS);
	run_until(UINT64_MAX - 1);
	for (uint32_t i = 0; i < 100; i++)
		CHECK(records[i].due_ns == (i < 50 ? (i + 1) * MS : 50 * MS + (i - 49) * MS / 10));
	enter(100, 1500, 1000 * MS); /* After a rest, a rate owes nothing. */
	run_until(UINT64_MAX - 1);
	CHECK(records[100].due_ns == 1000 * MS + MS / 10);
	end();
}

static void test_a_hosts_rate_comes_before_and_behind_the_paths(void)
{
	struct settings settings = begin(1);
	settings.paths[0][1].delay_ns = 5 * MS;
	settings.hosts[0].egress = 12e6;
	settings.hosts[1].ingress = 6e6;
	settings.hosts[0].egress_queue_bytes = settings.hosts[1].ingress_queue_bytes = 1e6;
	model_configure(&settings, 0);
	for (uint32_t i = 0; i < 4; i++)
		enter(i, 1500, 0);
	run_until(UINT64_MAX - 1);
	for (uint32_t i = 0; i < 4; i++)
		CHECK(records[i].due_ns == (1 + 5 + 2 * (i + 1)) * MS);
	end();
}

static void test_a_full_queue_drops_what_does_not_fit(void)
{
	struct settings settings = begin(1);
	settings.paths[0][1].rate = 12e6;
	settings.paths[0][1].queue_bytes = 15000;
	model_configure(&settings, 0);
	for (uint32_t i = 0; i < 30; i++)
		enter(i, 1500, 0);
	CHECK(model_counts(0, 1)->overflown == 20 && model_counts(0, 1)->queue_bytes_max == 15000);
	run_until(UINT64_MAX - 1);
	CHECK(record_count == 10 && records[9].number == 9 && model_counts(0, 1)->out == 10);
	settings.burst_ns = 1000 * MS; /* The super-packet comes in one piece, of which ten segments fit. */
	model_configure(&settings, 1000 * MS);
	enter_super_packet(1000 * MS);
	CHECK(model_counts(0, 1)->overflown == 24);
	run_until(UINT64_MAX - 1);
	CHECK(records[10].segments == 10 && records[10].wire_bytes == 10 * (SEGMENT + HEADERS));
	end();
}

static void test_super_packets_are_cut_where_a_rate_is_low(void)
{
	struct settings settings = begin(1);
	enter_super_packet(0);
	CHECK(record_count == 1 && records[0].segments == 14 && pieces_are_right);
	payload_bytes = record_count = 0;
	settings.paths[0][1].rate = 120e6; /* 250 us are 3750 bytes: two segments. */
	model_configure(&settings, 0);
	enter_super_packet(0);
	run_until(UINT64_MAX - 1);
	CHECK(record_count == 7 && payload_bytes == 20000 && pieces_are_right);
	for (unsigned i = 0; i < 20000; i++)
		CHECK(payload[i] == (unsigned char)(i * 7 + i / 256));
	uint64_t whole_ns = (uint64_t)((20000 + 14 * HEADERS) * 8 / 0.12);
	CHECK(llabs((long long)(records[6].due_ns - whole_ns)) <= 7);
	end();
}

static void test_losses_are_as_many_as_asked_for_and_the_seeds(void)
{
	static unsigned char lost[3][100000];
	const unsigned count = 100000;
	for (unsigned round = 0; round < 3; round++) {
		struct settings settings = begin(round == 2 ? 8 : 7);
		settings.paths[0][1].loss = 0.01;
		model_configure(&settings, 0);
		memset(lost[round], 1, count);
		for (uint32_t i = 0; i < count; i++)
			enter(i, 100, i);
		for (unsigned i = 0; i < record_count; i++)
			lost[round][records[i].number] = 0;
		double deviation = sqrt(count * 0.01 * 0.99);
		CHECK(model_counts(0, 1)->lost == count - record_count);
		CHECK(fabs((double)(count - record_count) - count * 0.01) < 5 * deviation);
		end();
	}
	CHECK(memcmp(lost[0], lost[1], count) == 0);
	CHECK(memcmp(lost[0], lost[2], count) != 0);
}

static void test_losses_come_in_runs(void)
{
	const unsigned count = 100000;
	struct settings settings = begin(3);
	settings.paths[0][1].loss = 0.05;
	settings.paths[0][1].loss_run = 4;
	model_configure(&settings, 0);
	for (uint32_t i = 0; i < count; i++)
		enter(i, 100, i);
	unsigned runs = 0, lost = count - record_count;
	for (unsigned i = 1; i < record_count; i++)
		runs += records[i].number != records[i - 1].number + 1;
	CHECK(lost > 4000 && lost < 6000);
	CHECK(lost > 3 * runs && lost < 5 * runs);
	end();
}

static void test_losses_within_super_packets_leave_whole_segments(void)
{
	struct settings settings = begin(5);
	settings.paths[0][1].loss = 0.2;
	model_configure(&settings, 0);
	uint64_t segments = 0;
	for (unsigned i = 0; i < 1000; i++) {
		payload_bytes = 0;
		pieces_are_right = true;
		enter_super_packet(i);
	}
	for (unsigned i = 0; i < record_count; i++)
		segments += records[i].segments;
	const struct path_counts *counts = model_counts(0, 1);
	CHECK(counts->in == 14000 && counts->out == segments && counts->lost == 14000 - segments);
	CHECK(counts->lost > 2500 && counts->lost < 3100);
	end();
}

static void test_all_is_lost_where_the_loss_is_whole(void)
{
	struct settings settings = begin(5);
	settings.paths[0][1].loss = 1;
	model_configure(&settings, 0);
	for (uint32_t i = 0; i < 1000; i++)
		enter(i, 100, i);
	CHECK(record_count == 0 && model_counts(0, 1)->lost == 1000);
	end();
}

static void test_jitter_stays_in_its_bounds_and_keeps_the_order(void)
{
	struct settings settings = begin(9);
	settings.paths[0][1].delay_ns = 10 * MS;
	settings.paths[0][1].jitter_ns = 8 * MS;
	settings.paths[0][1].jitter_period_ns = 10 * MS;
	model_configure(&settings, 0);
	uint64_t least = UINT64_MAX, most = 0;
	for (uint32_t i = 0; i < 10000; i++)
		enter(i, 100, (uint64_t)i * MS / 10);
	run_until(UINT64_MAX - 1);
	CHECK(record_count == 10000);
	for (uint32_t i = 0; i < 10000; i++) {
		uint64_t taken = records[i].due_ns - (uint64_t)i * MS / 10;
		CHECK(records[i].number == i && (i == 0 || records[i].due_ns >= records[i - 1].due_ns));
		least = taken < least ? taken : least;
		most = taken > most ? taken : most;
	}
	CHECK(least >= 2 * MS && least < 6 * MS && most <= 18 * MS && most > 14 * MS);
	end();
}

static void test_a_cut_takes_what_is_under_way(void)
{
	struct settings settings = begin(1);
	settings.paths[0][1].delay_ns = 10 * MS;
	model_configure(&settings, 0);
	enter(0, 100, 0);
	settings.paths[0][1].cut = true;
	model_configure(&settings, 5 * MS);
	enter(1, 100, 5 * MS);
	run_until(20 * MS);
	CHECK(record_count == 0 && model_counts(0, 1)->cut == 2);
	settings.paths[0][1].cut = false;
	settings.hosts[0].down = true;
	model_configure(&settings, 20 * MS);
	enter(2, 100, 20 * MS);
	settings.hosts[0].down = false;
	model_configure(&settings, 21 * MS);
	enter(3, 100, 21 * MS);
	run_until(UINT64_MAX - 1);
	CHECK(record_count == 1 && records[0].number == 3 && model_counts(0, 1)->cut == 3);
	end();
}

static void test_memory_has_a_bound(void)
{
	struct settings settings = begin(1);
	settings.paths[0][1].delay_ns = 10 * MS;
	settings.memory_bytes = 10000;
	model_configure(&settings, 0);
	for (uint32_t i = 0; i < 1000; i++)
		enter(i, 100, 0);
	CHECK(packet_memory_max() < 11000 && model_counts(0, 1)->overflown > 900);
	end();
}

static void test_what_is_no_packet_is_refused(void)
{
	struct packet *packet = packet_new(PACKET_PREFIX_BYTES + 60);
	struct virtio_net_hdr *prefix = (struct virtio_net_hdr *)packet->data;
	struct iphdr *ip = (struct iphdr *)(packet->data + PACKET_PREFIX_BYTES);
	memset(packet->data, 0, PACKET_PREFIX_BYTES + 60);
	packet->bytes = PACKET_PREFIX_BYTES + 60;
	CHECK(!packet_parse(packet));
	ip->version = 4;
	ip->ihl = 4;
	CHECK(!packet_parse(packet));
	ip->ihl = 5;
	CHECK(packet_parse(packet));
	prefix->gso_type = VIRTIO_NET_HDR_GSO_TCPV4;
	prefix->gso_size = 10;
	CHECK(!packet_parse(packet)); /* Its TCP header has no length. */
	((struct tcphdr *)(ip + 1))->doff = 15;
	CHECK(!packet_parse(packet)); /* It is longer than the packet. */
	packet->bytes = PACKET_PREFIX_BYTES + 19;
	CHECK(!packet_parse(packet));
	packet_drop(packet);
}

int main(void)
{
	test_delay_is_exact();
	test_rate_is_exact_and_changes_at_once();
	test_a_hosts_rate_comes_before_and_behind_the_paths();
	test_a_full_queue_drops_what_does_not_fit();
	test_super_packets_are_cut_where_a_rate_is_low();
	test_losses_are_as_many_as_asked_for_and_the_seeds();
	test_losses_come_in_runs();
	test_losses_within_super_packets_leave_whole_segments();
	test_all_is_lost_where_the_loss_is_whole();
	test_jitter_stays_in_its_bounds_and_keeps_the_order();
	test_a_cut_takes_what_is_under_way();
	test_memory_has_a_bound();
	test_what_is_no_packet_is_refused();
	return 0;
}
