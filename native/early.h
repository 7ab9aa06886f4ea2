/* Frames that are received, and frames that are sent, before their attempt has begun at the receiver; see early.c. */
#ifndef ZP_EARLY_H
#define ZP_EARLY_H

#include <stdbool.h>
#include <stdint.h>

#include "link.h"
#include "list.h"

/* early.c. All except zp__early_replay(): lock held. */
bool zp__is_eager(const zp__attempt *attempt);
zp__list *zp__frame_next(zp__link *link, zp__flow **flow); /* next frame that may be sent, and its flow; NULL: none */
void zp__eager_release(zp__link *link, zp__flow *flow); /* the flow is closed */
void zp__opened_offer(zp__link *link);
void zp__started_offer(zp__link *link, zp__flow *flow);
void zp__announce_again(zp__link *link); /* a connection was lost */
bool zp__announcement_take(zp__connection *connection);
enum zp__verdict zp__opened_admit(zp__connection *connection);
enum zp__verdict zp__started_admit(zp__connection *connection);
void zp__early_keep(zp__message_in *early);
void zp__early_drop(const zp__link *link); /* the link is lost */
/* An id was learnt; the greatest one was `before`. Drops frames of attempts that have ended by that. */
void zp__early_drop_ended(zp_engine *engine, uint64_t id, uint64_t before);
bool zp__early_is_kept(zp_engine *engine, uint64_t id); /* false: no frame of this attempt is kept */
void zp__early_replay(zp_engine *engine, uint64_t id);

#endif
