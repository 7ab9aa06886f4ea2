/* Flows with a schedule: frame after frame in equal steps from the start of the attempt, as fast as the plan expects.
 *
 * The links of a host share its line, and TCP divides it without regard to how much each of them has to send. A link
 * that gets ahead of the plan takes bandwidth from those that others wait for. So a frame that is not due yet waits.
 * A flow that is late, because it waited for input or its path was slow, catches up as fast as its path allows.
 *
 * The schedule is by time alone, and no flow waits for another one. The first I/O thread wakes a link whose next frame
 * has become due. All functions expect the lock held. */
#include "bounds.h"
#include "engine.h"
#include "link.h"
#include "pace.h"
#include "sock.h"

void zp__pace_start(zp__flow *flow, uint64_t duration_us, uint64_t frames)
{
	uint64_t step_ns = frames ? duration_us * 1000 / frames : 0;
	flow->step_ns = step_ns < ZP__PACE_STEP_NS_MAX ? step_ns : ZP__PACE_STEP_NS_MAX;
	zp__pace_restart(flow);
}

void zp__pace_restart(zp__flow *flow)
{
	if (flow->step_ns)
		flow->due_ns = zp__now_ns();
}

bool zp__pace_holds(zp__link *link, const zp__flow *flow)
{
	if (!flow->step_ns || flow->due_ns <= zp__now_ns())
		return false;
	zp_engine *engine = link->engine;
	link->withholds = true;
	if (flow->due_ns < link->resume_ns)
		link->resume_ns = flow->due_ns;
	if (flow->due_ns < engine->resume_ns) {
		engine->resume_ns = flow->due_ns;
		engine->threads[0].checks = true;
		zp__thread_wake(&engine->threads[0]);
	}
	return true;
}

uint64_t zp__paces_check(zp_engine *engine, uint64_t now_ns)
{
	if (now_ns < engine->resume_ns)
		return engine->resume_ns;
	engine->resume_ns = UINT64_MAX;
	ZP__EACH(node, &engine->links)
	{
		zp__link *link = ZP__ELEMENT(node, zp__link, node);
		if (link->resume_ns <= now_ns) {
			link->resume_ns = UINT64_MAX;
			zp__link_look_again(link);
		} else if (link->resume_ns < engine->resume_ns) {
			engine->resume_ns = link->resume_ns;
		}
	}
	return engine->resume_ns;
}
