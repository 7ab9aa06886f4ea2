/* Events that wait to be polled, and their queues. */
#ifndef ZP_EVENT_H
#define ZP_EVENT_H

#include "list.h"
#include "zp_api.h"

/* An event that waits to be polled. It is embedded in its subject, so that queueing it allocates nothing. */
typedef struct {
	zp__list node; /* in a queue, or in no list */
	zp_event event;
} zp__event;

typedef struct {
	zp__list events;   /* all other events; they are polled first, so no peer can delay them with messages */
	zp__list messages; /* MESSAGE events */
	int fd;		   /* a wakeup's write_fd, which is signalled when the first event comes */
} zp__queue;

/* Lock held. */
zp__event *zp__event_next(const zp__queue *queue);
void zp__event_push(zp__queue *queue, zp__event *event);
void zp__event_withdraw(zp_engine *engine, zp__event *event); /* from the engine's queue */

#endif
