/* Theory of operation. Every stage that holds packets is a FIFO queue; due[] is the time at which its head leaves it. The
 * caller repeatedly steps the earliest one. A shaper serves its head for its transmission time, from its arrival or from
 * the end of the previous packet, whichever is later; so late steps do not lower the rate. The due time, not the time of
 * the step, is passed to the next stage: lateness does not accumulate. */
#include "model.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define GAP_MAX 1e15 /* segments; no test lasts longer */

enum stage { EGRESS, PATH, DELAY, INGRESS };

struct queue {
	struct packet *head, *tail;
	double bytes, bytes_max, bytes_limit;
	double bytes_per_ns; /* 0: no limit */
	uint64_t free_ns;    /* time since which it is idle */
	enum stage stage;
};

struct path { /* state of one direction */
	uint64_t random;
	uint64_t good_left, bad_left; /* loss: segments until the next run of losses, and of that run */
	uint64_t turn_from_ns, turn_to_ns; /* jitter: a straight line between two turns */
	double turn_from, turn_to;
	struct path_counts counts;
};

static unsigned hosts, queue_count;
static struct queue *queues;
static uint64_t *due;
static struct path paths[MODEL_HOSTS_MAX][MODEL_HOSTS_MAX];
static struct settings current;
static deliver_function *deliver_packet;

static void pass(struct packet *packet, enum stage from, uint64_t now_ns);

static unsigned egress_of(unsigned host)
{
	return host;
}

static unsigned ingress_of(unsigned host)
{
	return hosts + host;
}

static unsigned path_of(unsigned from, unsigned to)
{
	return 2 * hosts + from * hosts + to;
}

static unsigned delay_of(unsigned from, unsigned to)
{
	return 2 * hosts + hosts * hosts + from * hosts + to;
}

static struct path *state_of(const struct packet *packet)
{
	return &paths[packet->from][packet->to];
}

/* Marsaglia's xorshift64; uniform in (0, 1). */
static double draw(struct path *path)
{
	path->random ^= path->random << 13;
	path->random ^= path->random >> 7;
	path->random ^= path->random << 17;
	return ((double)(path->random >> 11) + 0.5) / 9007199254740992.0;
}

/* The finaliser of splitmix64: makes similar seeds differ in all bits. */
static uint64_t mix(uint64_t value)
{
	value += 0x9e3779b97f4a7c15u;
	value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
	value = (value ^ value >> 27) * 0x94d049bb133111ebu;
	value ^= value >> 31;
	return value ? value : 1;
}

/* --- Queues ------------------------------------------------------------------------------------------------------- */

static void set_due(unsigned index)
{
	const struct queue *queue = &queues[index];
	const struct packet *head = queue->head;
	due[index] = MODEL_NEVER;
	if (!head)
		return;
	due[index] = head->time_ns;
	if (queue->stage == DELAY)
		return;
	if (queue->free_ns > due[index])
		due[index] = queue->free_ns;
	if (queue->bytes_per_ns > 0)
		due[index] += (uint64_t)(head->wire_bytes / queue->bytes_per_ns + 0.5);
}

static void push(unsigned index, struct packet *packet)
{
	struct queue *queue = &queues[index];
	packet->next = NULL;
	if (queue->head)
		queue->tail->next = packet;
	else
		queue->head = packet;
	queue->tail = packet;
	queue->bytes += packet->wire_bytes;
	if (queue->bytes > queue->bytes_max)
		queue->bytes_max = queue->bytes;
	if (queue->head == packet)
		set_due(index);
}

bool model_step(uint64_t now_ns, uint64_t *due_ns)
{
	unsigned first = 0;
	for (unsigned index = 1; index < queue_count; index++)
		if (due[index] < due[first])
			first = index;
	*due_ns = due[first];
	if (due[first] > now_ns || due[first] == MODEL_NEVER)
		return false;
	struct queue *queue = &queues[first];
	struct packet *packet = queue->head;
	queue->head = packet->next;
	queue->bytes -= packet->wire_bytes;
	queue->free_ns = *due_ns;
	set_due(first);
	pass(packet, queue->stage, *due_ns);
	return true;
}

/* --- Stages ------------------------------------------------------------------------------------------------------- */

static void overflow(struct packet *packet, unsigned segments)
{
	state_of(packet)->counts.overflown += segments;
}

/* The part of a super-packet that still fits into the queue. NULL: none. */
static struct packet *fit(const struct queue *queue, struct packet *packet)
{
	double room = queue->bytes_limit - queue->bytes;
	if (packet->wire_bytes <= room)
		return packet;
	unsigned count = 0;
	if (packet->segments > 1 && room > 0)
		count = (unsigned)(room / (packet->segment_bytes + packet->header_bytes));
	if (count >= packet->segments)
		count = packet->segments - 1u;
	struct packet *rest = count ? packet_slice(packet, 0, count) : NULL;
	overflow(packet, packet->segments - (rest ? count : 0));
	packet_drop(packet);
	return rest;
}

static void shape(unsigned index, struct packet *packet, uint64_t now_ns)
{
	struct queue *queue = &queues[index];
	if (queue->bytes_per_ns <= 0 && !queue->head) {
		pass(packet, queue->stage, now_ns);
		return;
	}
	packet->time_ns = now_ns;
	packet = fit(queue, packet);
	if (packet)
		push(index, packet);
}

/* The current deviation of the delay in ns. */
static double jitter(struct path *path, const struct path_settings *settings, uint64_t now_ns)
{
	if (settings->jitter_ns == 0)
		return 0;
	if (now_ns >= path->turn_to_ns) {
		path->turn_from_ns = now_ns;
		path->turn_from = path->turn_to;
		path->turn_to_ns = now_ns + settings->jitter_period_ns + 1;
		path->turn_to = (2 * draw(path) - 1) * (double)settings->jitter_ns;
	}
	double span = (double)(path->turn_to_ns - path->turn_from_ns);
	double done = (double)(int64_t)(now_ns - path->turn_from_ns) / span;
	return path->turn_from + (path->turn_to - path->turn_from) * done;
}

static void delay(struct packet *packet, uint64_t now_ns)
{
	unsigned index = delay_of(packet->from, packet->to);
	struct queue *queue = &queues[index];
	const struct path_settings *settings = &current.paths[packet->from][packet->to];
	double delay_ns = (double)settings->delay_ns + jitter(state_of(packet), settings, now_ns);
	if (delay_ns <= 0 && !queue->head) {
		pass(packet, DELAY, now_ns);
		return;
	}
	packet->time_ns = delay_ns > 0 ? now_ns + (uint64_t)delay_ns : now_ns;
	if (queue->head && queue->tail->time_ns > packet->time_ns)
		packet->time_ns = queue->tail->time_ns; /* Nothing overtakes. */
	push(index, packet);
}

/* Good and bad runs of segments are both geometric: with a mean run of 1 that is an independent draw for each. */
static void draw_runs(struct path *path, const struct path_settings *settings)
{
	double good_mean = settings->loss_run * (1 - settings->loss) / settings->loss;
	double good = floor(log(draw(path)) / log1p(-1 / (1 + good_mean)));
	path->good_left = (uint64_t)(good < GAP_MAX ? good : GAP_MAX);
	path->bad_left = 1;
	if (settings->loss_run > 1)
		path->bad_left += (uint64_t)(log(draw(path)) / log1p(-1 / settings->loss_run));
}

static void lose(struct packet *packet, uint64_t now_ns)
{
	struct path *path = state_of(packet);
	const struct path_settings *settings = &current.paths[packet->from][packet->to];
	unsigned segments = packet->segments;
	if (settings->loss <= 0) {
		delay(packet, now_ns);
		return;
	}
	for (unsigned next = 0; next < segments;) {
		if (!path->good_left && !path->bad_left)
			draw_runs(path, settings);
		unsigned left = segments - next;
		unsigned good = path->good_left < left ? (unsigned)path->good_left : left;
		path->good_left -= good;
		if (good == segments) {
			delay(packet, now_ns);
			return;
		}
		struct packet *slice = good ? packet_slice(packet, next, good) : NULL;
		if (slice)
			delay(slice, now_ns);
		else
			overflow(packet, good);
		next += good;
		left -= good;
		unsigned bad = path->bad_left < left ? (unsigned)path->bad_left : left;
		path->bad_left -= bad;
		path->counts.lost += bad;
		next += bad;
	}
	packet_drop(packet);
}

static bool is_cut(const struct packet *packet)
{
	return current.paths[packet->from][packet->to].cut || current.hosts[packet->from].down ||
	       current.hosts[packet->to].down;
}

static void deliver(struct packet *packet, uint64_t now_ns)
{
	struct path_counts *counts = &state_of(packet)->counts;
	if (is_cut(packet)) {
		counts->cut += packet->segments;
	} else {
		deliver_packet(packet, now_ns);
		counts->out += packet->segments;
		counts->out_bytes += packet->wire_bytes;
	}
	packet_drop(packet);
}

static void pass(struct packet *packet, enum stage from, uint64_t now_ns)
{
	switch (from) {
	case EGRESS:
		shape(path_of(packet->from, packet->to), packet, now_ns);
		break;
	case PATH:
		lose(packet, now_ns);
		break;
	case DELAY:
		shape(ingress_of(packet->to), packet, now_ns);
		break;
	case INGRESS:
		deliver(packet, now_ns);
		break;
	}
}

/* Number of segments of a packet that stay together: `burst_ns` of transmission time on its slowest line. */
static unsigned piece_segments(const struct packet *packet)
{
	const unsigned shapers[] = {egress_of(packet->from), path_of(packet->from, packet->to), ingress_of(packet->to)};
	double slowest = 0;
	for (unsigned i = 0; i < 3; i++) {
		double rate = queues[shapers[i]].bytes_per_ns;
		if (rate > 0 && (slowest == 0 || rate < slowest))
			slowest = rate;
	}
	double bytes = slowest * (double)current.burst_ns;
	if (slowest == 0 || packet->segments == 1 || bytes >= packet->wire_bytes)
		return packet->segments;
	unsigned segments = (unsigned)(bytes / (packet->segment_bytes + packet->header_bytes));
	return segments ? segments : 1;
}

void model_enter(struct packet *packet, uint64_t now_ns)
{
	struct path_counts *counts = &state_of(packet)->counts;
	counts->in += packet->segments;
	counts->in_bytes += packet->wire_bytes;
	if (is_cut(packet)) {
		counts->cut += packet->segments;
		packet_drop(packet);
		return;
	}
	if ((double)packet_memory() > current.memory_bytes) {
		overflow(packet, packet->segments);
		packet_drop(packet);
		return;
	}
	unsigned piece = piece_segments(packet);
	if (piece >= packet->segments) {
		shape(egress_of(packet->from), packet, now_ns);
		return;
	}
	for (unsigned next = 0; next < packet->segments; next += piece) {
		unsigned count = packet->segments - next < piece ? packet->segments - next : piece;
		struct packet *slice = packet_slice(packet, next, count);
		if (slice)
			shape(egress_of(packet->from), slice, now_ns);
		else
			overflow(packet, count);
	}
	packet_drop(packet);
}

/* --- Settings and counts ------------------------------------------------------------------------------------------ */

int model_open(unsigned host_count, uint64_t seed, deliver_function *function)
{
	hosts = host_count;
	deliver_packet = function;
	queue_count = 2 * hosts + 2 * hosts * hosts;
	queues = calloc(queue_count, sizeof *queues);
	due = malloc(queue_count * sizeof *due);
	if (!queues || !due) {
		model_close();
		return -ENOMEM;
	}
	for (unsigned index = 0; index < queue_count; index++) {
		due[index] = MODEL_NEVER;
		queues[index].bytes_limit = INFINITY;
	}
	for (unsigned i = 0; i < hosts; i++) {
		queues[egress_of(i)].stage = EGRESS;
		queues[ingress_of(i)].stage = INGRESS;
		for (unsigned j = 0; j < hosts; j++) {
			queues[path_of(i, j)].stage = PATH;
			queues[delay_of(i, j)].stage = DELAY;
			paths[i][j].random = mix(mix(seed) + i * MODEL_HOSTS_MAX + j);
		}
	}
	return 0;
}

void model_close(void)
{
	free(queues);
	free(due);
	queues = NULL;
	due = NULL;
}

/* If the rate changes, the service of the current packet restarts. */
static void set_rate(unsigned index, double rate, double queue_bytes, uint64_t now_ns)
{
	struct queue *queue = &queues[index];
	double bytes_per_ns = rate / 8e9;
	queue->bytes_limit = rate > 0 ? queue_bytes : INFINITY;
	if (queue->bytes_per_ns == bytes_per_ns)
		return;
	queue->bytes_per_ns = bytes_per_ns;
	if (queue->free_ns < now_ns)
		queue->free_ns = now_ns;
	set_due(index);
}

void model_configure(const struct settings *settings, uint64_t now_ns)
{
	for (unsigned i = 0; i < hosts; i++) {
		const struct host_settings *host = &settings->hosts[i];
		set_rate(egress_of(i), host->egress, host->egress_queue_bytes, now_ns);
		set_rate(ingress_of(i), host->ingress, host->ingress_queue_bytes, now_ns);
		for (unsigned j = 0; j < hosts; j++) {
			const struct path_settings *path = &settings->paths[i][j], *old = &current.paths[i][j];
			set_rate(path_of(i, j), path->rate, path->queue_bytes, now_ns);
			if (path->loss != old->loss || path->loss_run != old->loss_run)
				paths[i][j].good_left = paths[i][j].bad_left = 0;
		}
	}
	current = *settings;
}

const struct settings *model_settings(void)
{
	return &current;
}

const struct path_counts *model_counts(unsigned from, unsigned to)
{
	struct path_counts *counts = &paths[from][to].counts;
	counts->queue_bytes_max = (uint64_t)queues[path_of(from, to)].bytes_max;
	return counts;
}

void model_reset_counts(void)
{
	for (unsigned i = 0; i < hosts; i++) {
		for (unsigned j = 0; j < hosts; j++) {
			struct queue *queue = &queues[path_of(i, j)];
			queue->bytes_max = queue->bytes;
			memset(&paths[i][j].counts, 0, sizeof paths[i][j].counts);
		}
	}
}
