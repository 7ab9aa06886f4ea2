/* Flows with a schedule; see pace.c. Lock held. */
#ifndef ZP_PACE_H
#define ZP_PACE_H

#include <stdbool.h>
#include <stdint.h>

#include "link.h"

void zp__pace_start(zp__flow *flow, uint64_t duration_us, uint64_t frames); /* duration 0: without a schedule */
void zp__pace_restart(zp__flow *flow);				 /* what is left of its schedule begins now */
bool zp__pace_holds(zp__link *link, const zp__flow *flow);	 /* its next frame is not due; the link is woken then */
uint64_t zp__paces_check(zp_engine *engine, uint64_t now_ns);	 /* wakes links; the next deadline, or UINT64_MAX */

#endif
