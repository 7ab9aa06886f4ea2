/* The model of the paths between hosts: shapers, random loss, delay. No I/O and no clock: time is an argument.
 *
 *   enter -> [egress shaper of the host] -> [shaper of the path] -> loss -> delay line -> [ingress shaper] -> deliver
 *
 * One thread. The model owns each packet from model_enter() to deliver(). */
#ifndef WAN_MODEL_H
#define WAN_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "packet.h"

#define MODEL_HOSTS_MAX 16u
#define MODEL_NEVER UINT64_MAX

struct path_settings { /* of one direction */
	uint64_t delay_ns;
	uint64_t jitter_ns;	   /* amplitude of the variation of the delay; packets keep their order */
	uint64_t jitter_period_ns; /* period of the variation */
	double rate;		   /* bits a second; 0: no limit */
	double loss;		   /* share of segments */
	double loss_run;	   /* mean number of segments lost in a row */
	double queue_bytes;	   /* before the shaper */
	bool cut;
};

struct host_settings {
	double egress, ingress; /* bits a second; 0: no limit */
	double egress_queue_bytes, ingress_queue_bytes;
	bool down;
};

struct settings {
	struct path_settings paths[MODEL_HOSTS_MAX][MODEL_HOSTS_MAX];
	struct host_settings hosts[MODEL_HOSTS_MAX];
	uint64_t burst_ns;    /* maximum size of a piece of a super-packet at a shaper, as time on the line */
	uint64_t coalesce_ns; /* minimum time between two wake-ups under load; 0: none */
	double memory_bytes;  /* bound on packets in flight; further ones are dropped */
};

struct path_counts { /* in segments, and their bytes on the wire */
	uint64_t in, in_bytes, out, out_bytes;
	uint64_t lost;	    /* by chance */
	uint64_t overflown; /* by a full queue, or memory */
	uint64_t cut;
	uint64_t queue_bytes_max;
};

typedef void deliver_function(const struct packet *packet, uint64_t due_ns);

/* 0, or -ENOMEM. With the same seed and the same packets on a path the same packets are lost. */
int model_open(unsigned host_count, uint64_t seed, deliver_function *deliver);
void model_close(void);
void model_configure(const struct settings *settings, uint64_t now_ns);
const struct settings *model_settings(void);
/* Takes a parsed packet, with from and to. */
void model_enter(struct packet *packet, uint64_t now_ns);
/* Moves the earliest packet to its next stage if it is due; returns false if it is not. Sets *due_ns to its due time, or
 * MODEL_NEVER if there is no packet. */
bool model_step(uint64_t now_ns, uint64_t *due_ns);
const struct path_counts *model_counts(unsigned from, unsigned to);
void model_reset_counts(void);

#endif
