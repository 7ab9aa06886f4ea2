/* The emulator: reads packets from one TUN device per host, passes them to the model, and writes the delivered ones.
 *
 *   emulator NETWORK SEED CPU REALTIME CONTROL TUN TUN...
 *
 * NETWORK is the upper 16 bits of all addresses, as a number; the lower 16 bits are 256 * host + 1. CPU is the CPU to run
 * on, or -1. REALTIME is 1 for the scheduling class FIFO. CONTROL and the TUNs are open descriptors inherited from the
 * parent; the process ends when the other end of CONTROL is closed, however the parent ended.
 *
 * CONTROL is a Unix packet socket. Each packet holds lines that are applied atomically, and gets one answer: "ok",
 * "error: ...", or the requested output. All numbers are in ns, bits per second, and bytes:
 *
 *   timing BURST COALESCE MEMORY
 *   path FROM TO DELAY JITTER JITTER_PERIOD RATE LOSS LOSS_RUN QUEUE CUT
 *   host HOST EGRESS EGRESS_QUEUE INGRESS INGRESS_QUEUE DOWN
 *   counts | reset
 *
 * One thread owns all descriptors and the model. It sleeps in ppoll; under load for at least COALESCE between two
 * wake-ups, like the interrupt coalescing of a network card. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "model.h"

#define REQUEST_BYTES_MAX (128u << 10)
#define REPLY_BYTES_MAX (128u << 10)
#define STEPS_MAX 256u /* of the model, and reads of one device, before the others have their turn */
#define LATE_NS 1000000u

static struct {
	uint64_t reads, writes, write_errors, no_route, late, late_ns, late_ns_max;
	uint64_t began_ns, cpu_began_ns;
} totals;

static unsigned host_count;
static uint32_t network;
static int devices[MODEL_HOSTS_MAX];
static struct packet *spare; /* the buffer that the next packet is read to */

static uint64_t now(clockid_t clock)
{
	struct timespec time;
	clock_gettime(clock, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* --- Packets ------------------------------------------------------------------------------------------------------ */

static void write_packet(const struct packet *packet, uint64_t due_ns)
{
	uint64_t late_ns = now(CLOCK_MONOTONIC) - due_ns;
	totals.writes++;
	totals.late_ns += late_ns;
	totals.late += late_ns > LATE_NS;
	if (late_ns > totals.late_ns_max)
		totals.late_ns_max = late_ns;
	if (write(devices[packet->to], packet->data, packet->bytes) < 0)
		totals.write_errors++;
}

static void route(struct packet *packet, unsigned from)
{
	if (!packet_parse(packet)) {
		totals.no_route++;
		packet_drop(packet);
		return;
	}
	uint32_t destination = packet_destination(packet);
	unsigned to = destination >> 8 & 0xff;
	if (destination >> 16 != network || to >= host_count || to == from) {
		totals.no_route++;
		packet_drop(packet);
		return;
	}
	packet->from = (uint8_t)from;
	packet->to = (uint8_t)to;
	model_enter(packet, now(CLOCK_MONOTONIC));
}

/* Copies a short packet to a buffer of its size, since otherwise each packet in flight would take 64 KiB. NULL: no
 * memory. */
static struct packet *take_spare(uint32_t bytes)
{
	struct packet *packet = spare;
	if (bytes <= PACKET_COPIED_BYTES_MAX) {
		packet = packet_new(bytes);
		if (packet)
			memcpy(packet->data, spare->data, bytes);
	} else {
		spare = NULL;
	}
	if (packet)
		packet->bytes = bytes;
	return packet;
}

/* Reads packets of a host. True: the device is not empty yet. */
static bool read_packets(unsigned host)
{
	for (unsigned i = 0; i < STEPS_MAX; i++) {
		if (!spare && !(spare = packet_new(PACKET_BYTES_MAX)))
			return true;
		ssize_t bytes = read(devices[host], spare->data, PACKET_BYTES_MAX);
		if (bytes <= 0)
			return false;
		totals.reads++;
		struct packet *packet = take_spare((uint32_t)bytes);
		if (packet)
			route(packet, host);
	}
	return true;
}

/* --- Control ------------------------------------------------------------------------------------------------------ */

static bool is_share(double value)
{
	return value >= 0 && value <= 1;
}

static bool read_path(struct settings *settings, const char *line)
{
	struct path_settings path = {0};
	unsigned from, to, cut;
	int count = sscanf(line, "path %u %u %lu %lu %lu %lf %lf %lf %lf %u", &from, &to, &path.delay_ns, &path.jitter_ns,
			   &path.jitter_period_ns, &path.rate, &path.loss, &path.loss_run, &path.queue_bytes, &cut);
	if (count != 10 || from >= host_count || to >= host_count || !is_share(path.loss) || !(path.loss_run >= 1) ||
	    !(path.rate >= 0) || !(path.queue_bytes >= 0))
		return false;
	path.cut = cut != 0;
	settings->paths[from][to] = path;
	return true;
}

static bool read_host(struct settings *settings, const char *line)
{
	struct host_settings host = {0};
	unsigned index, down;
	int count = sscanf(line, "host %u %lf %lf %lf %lf %u", &index, &host.egress, &host.egress_queue_bytes,
			   &host.ingress, &host.ingress_queue_bytes, &down);
	if (count != 6 || index >= host_count || !(host.egress >= 0) || !(host.ingress >= 0))
		return false;
	host.down = down != 0;
	settings->hosts[index] = host;
	return true;
}

static bool read_settings(struct settings *settings, const char *line)
{
	if (!strncmp(line, "path ", 5))
		return read_path(settings, line);
	if (!strncmp(line, "host ", 5))
		return read_host(settings, line);
	return sscanf(line, "timing %lu %lu %lf", &settings->burst_ns, &settings->coalesce_ns, &settings->memory_bytes) == 3;
}

static void print_counts(FILE *out)
{
	for (unsigned from = 0; from < host_count; from++) {
		for (unsigned to = 0; to < host_count; to++) {
			const struct path_counts *counts = model_counts(from, to);
			if (from != to)
				fprintf(out, "path from=%u to=%u in=%lu in_bytes=%lu out=%lu out_bytes=%lu lost=%lu overflown=%lu"
					     " cut=%lu queue_bytes_max=%lu\n", from, to, counts->in, counts->in_bytes, counts->out,
					counts->out_bytes, counts->lost, counts->overflown, counts->cut, counts->queue_bytes_max);
		}
	}
	fprintf(out, "total reads=%lu writes=%lu write_errors=%lu no_route=%lu late=%lu late_ns_mean=%lu late_ns_max=%lu"
		     " memory_bytes_max=%lu cpu_ns=%lu wall_ns=%lu\n", totals.reads, totals.writes, totals.write_errors,
		totals.no_route, totals.late, totals.writes ? totals.late_ns / totals.writes : 0, totals.late_ns_max,
		packet_memory_max(), now(CLOCK_PROCESS_CPUTIME_ID) - totals.cpu_began_ns,
		now(CLOCK_MONOTONIC) - totals.began_ns);
}

static void reset_counts(void)
{
	memset(&totals, 0, sizeof totals);
	model_reset_counts();
	packet_memory_reset();
	totals.began_ns = now(CLOCK_MONOTONIC);
	totals.cpu_began_ns = now(CLOCK_PROCESS_CPUTIME_ID);
}

static void answer(char *request, FILE *out)
{
	struct settings settings = *model_settings();
	bool changed = false;
	char *rest;
	for (char *line = strtok_r(request, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
		if (!strcmp(line, "counts")) {
			print_counts(out);
		} else if (!strcmp(line, "reset")) {
			reset_counts();
		} else if (read_settings(&settings, line)) {
			changed = true;
		} else {
			fprintf(out, "error: %.200s\n", line);
			return;
		}
	}
	if (changed)
		model_configure(&settings, now(CLOCK_MONOTONIC));
	fputs("ok\n", out);
}

/* Handles a request. False: the other end is closed. */
static bool control(int fd)
{
	static char request[REQUEST_BYTES_MAX], reply[REPLY_BYTES_MAX];
	ssize_t bytes = recv(fd, request, sizeof request - 1, MSG_DONTWAIT);
	if (bytes < 0)
		return errno == EAGAIN || errno == EINTR;
	if (bytes == 0)
		return false;
	request[bytes] = 0;
	FILE *out = fmemopen(reply, sizeof reply, "w");
	if (!out)
		return false;
	answer(request, out);
	long length = ftell(out);
	fclose(out);
	return send(fd, reply, (size_t)length, MSG_NOSIGNAL) >= 0;
}

/* --- Loop --------------------------------------------------------------------------------------------------------- */

static int nap(struct pollfd *fds, nfds_t count, uint64_t ns)
{
	struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
	return ppoll(fds, count, ns == MODEL_NEVER ? NULL : &time, NULL);
}

/* Runs all due steps of the model; returns their number, and sets *due_ns to the time of the next one. */
static unsigned step_all(uint64_t *due_ns)
{
	uint64_t now_ns = now(CLOCK_MONOTONIC);
	unsigned steps = 0;
	for (; steps < STEPS_MAX; steps++) {
		if (model_step(now_ns, due_ns))
			continue;
		now_ns = now(CLOCK_MONOTONIC);
		if (!model_step(now_ns, due_ns))
			break;
	}
	return steps;
}

static void run(int control_fd)
{
	struct pollfd fds[MODEL_HOSTS_MAX + 1];
	for (unsigned host = 0; host < host_count; host++)
		fds[host] = (struct pollfd){.fd = devices[host], .events = POLLIN};
	fds[host_count] = (struct pollfd){.fd = control_fd, .events = POLLIN};
	for (;;) {
		uint64_t woke_ns = now(CLOCK_MONOTONIC), due_ns;
		unsigned steps = step_all(&due_ns);
		uint64_t now_ns = now(CLOCK_MONOTONIC), coalesce_ns = model_settings()->coalesce_ns;
		uint64_t wait_ns = due_ns == MODEL_NEVER ? MODEL_NEVER : due_ns > now_ns ? due_ns - now_ns : 0;
		bool busy = steps > 0, more = steps == STEPS_MAX;
		if (busy && coalesce_ns)
			wait_ns = 0;
		if (nap(fds, host_count + 1, wait_ns) > 0) {
			if (wait_ns)
				woke_ns = now(CLOCK_MONOTONIC);
			for (unsigned host = 0; host < host_count; host++) {
				if (fds[host].revents & POLLIN) {
					more |= read_packets(host);
					busy = true;
				}
			}
			if (fds[host_count].revents && !control(control_fd))
				return;
		}
		now_ns = now(CLOCK_MONOTONIC);
		if (busy && coalesce_ns && !more && now_ns < woke_ns + coalesce_ns)
			nap(NULL, 0, woke_ns + coalesce_ns - now_ns);
	}
}

/* Improves timer precision (CPU affinity, scheduling class); reports what is not permitted and continues without. */
static void be_punctual(int cpu, bool realtime)
{
	cpu_set_t cpus;
	CPU_ZERO(&cpus);
	if (cpu >= 0) {
		CPU_SET((unsigned)cpu, &cpus);
		if (sched_setaffinity(0, sizeof cpus, &cpus) < 0)
			perror("emulator: cannot stay on one CPU");
	}
	struct sched_param priority = {.sched_priority = 1};
	if (realtime && sched_setscheduler(0, SCHED_FIFO, &priority) < 0)
		perror("emulator: no real-time scheduling: times will be worse under load");
	(void)prctl(PR_SET_TIMERSLACK, 1ul);
}

int main(int argc, char **argv)
{
	if (argc < 8 || (unsigned)argc - 6 > MODEL_HOSTS_MAX) {
		fprintf(stderr, "usage: emulator NETWORK SEED CPU REALTIME CONTROL TUN TUN... (it is started by emulated.py)\n");
		return 2;
	}
	network = (uint32_t)strtoul(argv[1], NULL, 0);
	host_count = (unsigned)argc - 6;
	for (unsigned host = 0; host < host_count; host++)
		devices[host] = atoi(argv[6 + host]);
	int rc = model_open(host_count, strtoull(argv[2], NULL, 0), write_packet);
	if (rc < 0) {
		fprintf(stderr, "emulator: %s\n", strerror(-rc));
		return 1;
	}
	be_punctual(atoi(argv[3]), atoi(argv[4]) != 0);
	reset_counts();
	run(atoi(argv[5]));
	model_close();
	return 0;
}
