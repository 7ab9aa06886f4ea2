/* The commit between peers: the rules of zpccl/protocol/commit.py, for an exhaustive search by spin.
 *
 * tools/model/check.py compiles and runs it, in several configurations and with one rule broken at a time.
 * docs/model.md says what the model covers, what it leaves out, and why that loses nothing.
 *
 * There is one attempt, with one call of each peer. There is one leader at a time, as leadership.pml shows; a crash
 * stands for every event that replaces the leader. Peers are bits of a mask. The leader reads a peer's messages in the
 * order in which they were sent, at any later time or never. Peers read digests likewise, but in any order.
 */

#ifndef PEERS
#define PEERS 3          /* Participants. */
#endif
#ifndef LOSSES
#define LOSSES 1         /* Peers that die, or are lost although they are alive. */
#endif
#ifndef CRASHES
#define CRASHES 1        /* Leaders that are replaced. */
#endif
#ifndef AHEAD
#define AHEAD true       /* The attempt is planned ahead; false: its plan follows the votes. */
#endif

#define ALL (BIT(PEERS) - 1)
#define BIT(p) (1 << (p))
#define HAS(s, p) (((s) >> (p)) & 1)

/* --- State -------------------------------------------------------------------------------------------------------- */

/* States of a peer's call. */
#define IDLE 0           /* It has not called; without plans ahead: it has no plan. */
#define OTHER 1          /* It has made another call, or waits for a plan: it never starts the attempt. */
#define RUNNING 2
#define READY 3          /* It has its result. */
#define FAILED 4
#define COMMITTED 5      /* It has returned, because it has the digests of all. */
#define DONE 6           /* The leader has told it of the commit. */
#define ENDED 7          /* The attempt is aborted, or another one replaces it. */

/* Phases of the leader. */
#define VOTING 0
#define RUN 1
#define COMMIT 2
#define ABORT 3          /* With a plan ahead: another plan replaces it. */

byte call[PEERS];
byte got[PEERS];         /* Mask: peers whose digests it has. */
byte started, told, withdrawn, dead, lost;   /* Masks. */

bit leads = 1;           /* 0: another leader collects run reports. */
byte phase = (AHEAD -> VOTING : RUN);
byte voted = (AHEAD -> 0 : ALL);                     /* Masks: messages that this leader has read. */
byte succeeded, failed, took_back;
byte heard;              /* Mask: has the decision of this leader. */
byte reported;           /* Mask: its run report is here. */
byte losses = LOSSES;
byte crashes = CRASHES;

bit has_committed;       /* Only the check reads it: a peer has returned by the digests, and may be lost since. */

#define SURVIVORS (ALL & ~lost)
#define IS_ALIVE(p) (!HAS(dead, p))
#ifdef BREAK_COMMIT_NOT_REPORTED   /* Redundant: a peer that has committed reports its result, as all do. */
#define TELLS_COMMIT(p) (call[p] == DONE)
#else
#define TELLS_COMMIT(p) (call[p] == DONE || call[p] == COMMITTED)
#endif

/* --- Steps of a peer ---------------------------------------------------------------------------------------------- */

inline start(p) {
    call[p] = RUNNING;
    started = started | BIT(p)
}

inline finish(p) {
    call[p] = READY;
    if
#ifndef BREAK_TELL_WITHDRAWN
    :: HAS(withdrawn, p) -> skip
#endif
    :: else -> told = told | BIT(p)
    fi
}

#ifdef BREAK_RETURN_EARLY
#define HAS_DIGESTS(p) (got[p] != 0)
#else
#define HAS_DIGESTS(p) ((got[p] | BIT(p)) == ALL)
#endif
#define MAY_COMMIT(p) (call[p] == READY && HAS(told, p) && HAS_DIGESTS(p))
#ifdef BREAK_GIVE_UP_TOLD
#define MAY_WITHDRAW(p) ((call[p] == RUNNING || call[p] == READY) && !HAS(withdrawn, p))
#else
#define MAY_WITHDRAW(p) ((call[p] == RUNNING || call[p] == READY) && !HAS(withdrawn, p) && !HAS(told, p))
#endif

inline peer(p) {
    if
    :: call[p] == IDLE && AHEAD -> start(p)
    :: call[p] == IDLE && AHEAD -> call[p] = OTHER
    :: call[p] == IDLE && leads && phase == RUN && !HAS(lost, p) -> start(p)
    :: call[p] == RUNNING && started == ALL -> finish(p)
    :: call[p] == RUNNING -> call[p] = FAILED
    :: MAY_WITHDRAW(p) -> withdrawn = withdrawn | BIT(p)
    :: MAY_COMMIT(p) -> call[p] = COMMITTED; has_committed = 1
    :: (told & ~got[p] & ~BIT(p)) != 0 && call[p] != OTHER && call[p] < COMMITTED ->
        if
        :: HAS(told & ~BIT(p), 0) && !HAS(got[p], 0) -> got[p] = got[p] | 1
        :: HAS(told & ~BIT(p), 1) && !HAS(got[p], 1) -> got[p] = got[p] | 2
        :: HAS(told & ~BIT(p), 2) && !HAS(got[p], 2) -> got[p] = got[p] | 4
        fi
    fi
}

#define CAN_STEP(p) (IS_ALIVE(p) && \
    ((call[p] == IDLE && (AHEAD || (leads && phase == RUN && !HAS(lost, p)))) || call[p] == RUNNING || \
    MAY_WITHDRAW(p) || MAY_COMMIT(p) || \
    ((told & ~got[p] & ~BIT(p)) != 0 && call[p] != OTHER && call[p] < COMMITTED)))

/* --- Steps of the leader ------------------------------------------------------------------------------------------ */

#define IS_HERE(p) (leads && !HAS(lost, p))
#define CAN_READ_VOTE(p) (IS_HERE(p) && IS_ALIVE(p) && !HAS(voted, p) && call[p] != IDLE && call[p] < DONE)
#define CAN_READ_WITHDRAWAL(p) \
    (IS_HERE(p) && IS_ALIVE(p) && HAS(voted, p) && HAS(withdrawn, p) && !HAS(took_back, p) && phase < COMMIT)
#define IN_ORDER(p) (HAS(voted, p) && (HAS(told, p) || !HAS(withdrawn, p) || HAS(took_back, p)))
#define CAN_READ_SUCCESS(p) (IS_HERE(p) && IS_ALIVE(p) && IN_ORDER(p) && !HAS(succeeded, p) && \
    (call[p] == READY || call[p] == COMMITTED))
#define CAN_READ_FAILURE(p) (IS_HERE(p) && IS_ALIVE(p) && IN_ORDER(p) && !HAS(failed, p) && call[p] == FAILED)

/* The votes of all survivors are here, and all of them have started the attempt. */
#define ARE_COMPLETE (leads && phase == VOTING && (voted & SURVIVORS) == SURVIVORS && SURVIVORS != 0)
#ifdef BREAK_NO_RECALL
#define IS_STARTED_BY_ALL true
#else
#define IS_STARTED_BY_ALL ((started & SURVIVORS) == SURVIVORS && (took_back & SURVIVORS) == 0)
#endif

inline evaluate() {
    if
    :: !IS_STARTED_BY_ALL || (failed & SURVIVORS) != 0 -> phase = ABORT
    :: else ->
        if
        :: lost == 0 -> phase = RUN
#ifdef BREAK_PLAN_AT_LOSS
        :: lost != 0 -> phase = ABORT
#else
        :: lost != 0 && (succeeded & SURVIVORS) == SURVIVORS -> phase = COMMIT
#endif
        fi
    fi
}

#ifdef BREAK_PLAN_AT_LOSS
#define CAN_EVALUATE ARE_COMPLETE
#else
#define CAN_EVALUATE (ARE_COMPLETE && (!IS_STARTED_BY_ALL || (failed & SURVIVORS) != 0 || lost == 0 || \
    (succeeded & SURVIVORS) == SURVIVORS))
#endif
#ifdef BREAK_LOSS_ABORTS
#define IS_REASON_TO_ABORT ((failed & SURVIVORS) != 0 || (took_back & SURVIVORS) != 0 || lost != 0)
#else
#define IS_REASON_TO_ABORT ((failed & SURVIVORS) != 0 || (took_back & SURVIVORS) != 0)
#endif
#define CAN_JUDGE (leads && phase == RUN && SURVIVORS != 0 && \
    (IS_REASON_TO_ABORT || (succeeded & SURVIVORS) == SURVIVORS))

inline judge() {
    if
    :: (succeeded & SURVIVORS) == SURVIVORS && (took_back & SURVIVORS) == 0 -> phase = COMMIT
    :: else -> phase = ABORT
    fi
}

#define CAN_TELL(p) (IS_HERE(p) && IS_ALIVE(p) && phase >= COMMIT && HAS(voted, p) && !HAS(heard, p))

inline tell(p) {
    heard = heard | BIT(p);
    if
    :: call[p] == OTHER || call[p] == DONE || call[p] == ENDED -> skip
    :: phase == COMMIT && (call[p] == READY || call[p] == COMMITTED) -> call[p] = DONE
    :: phase == COMMIT && call[p] < READY || phase == COMMIT && call[p] == FAILED ->
        lost = lost | BIT(p);          /* It lacks the result, and leaves. */
        call[p] = ENDED
    :: phase == ABORT && call[p] == COMMITTED -> assert(phase == COMMIT)
    :: phase == ABORT && call[p] < COMMITTED -> call[p] = ENDED
    fi
}

/* --- Another leader ----------------------------------------------------------------------------------------------- */

#define CAN_REPORT(p) (!leads && IS_ALIVE(p) && !HAS(lost, p) && !HAS(reported, p))

inline crash() {
    crashes--;
    leads = 0;
    phase = VOTING;
    voted = 0; succeeded = 0; failed = 0; took_back = 0; heard = 0; reported = 0
}

#define ANY(condition) (condition(0) || condition(1) || condition(2))
#define COMMIT_IS_TOLD(p) (!HAS(lost, p) && TELLS_COMMIT(p))
#define END_IS_TOLD(p) (!HAS(lost, p) && call[p] == ENDED)
#define PLAN_IS_TOLD(p) (!HAS(lost, p) && HAS(started, p))

inline take_over() {
    leads = 1;
    if
    :: ANY(COMMIT_IS_TOLD) -> phase = COMMIT; voted = ALL
    :: else ->
        if
        :: ANY(END_IS_TOLD) -> phase = ABORT; voted = ALL
        :: else ->
            if
            :: AHEAD -> skip
            :: !AHEAD && ANY(PLAN_IS_TOLD) -> phase = RUN; voted = ALL
            :: else -> phase = ABORT; voted = ALL
            fi
        fi
    fi
}

/* --- All runs ----------------------------------------------------------------------------------------------------- */

#define HAS_RETURNED(p) (!HAS(lost, p) && call[p] == DONE)
#define IS_DENIED(p) (!HAS(lost, p) && IS_ALIVE(p) && call[p] == ENDED)
#define HAS_END(p) (HAS(lost, p) || HAS(dead, p) || call[p] == OTHER || call[p] == DONE || call[p] == ENDED)

inline steps_of(p) {
    if
    :: CAN_STEP(p) -> peer(p)
    :: CAN_READ_VOTE(p) -> voted = voted | BIT(p)
    :: CAN_READ_WITHDRAWAL(p) ->
        took_back = took_back | BIT(p);
        if
        :: phase == VOTING && call[p] != COMMITTED -> call[p] = ENDED; heard = heard | BIT(p)
        :: else -> skip
        fi
    :: CAN_READ_SUCCESS(p) -> succeeded = succeeded | BIT(p)
    :: CAN_READ_FAILURE(p) -> failed = failed | BIT(p)
    :: CAN_TELL(p) -> tell(p)
    :: CAN_REPORT(p) -> reported = reported | BIT(p)
    :: losses > 0 && IS_ALIVE(p) && !HAS(lost, p) -> losses--; dead = dead | BIT(p)
    :: losses > 0 && IS_ALIVE(p) && !HAS(lost, p) -> losses--; lost = lost | BIT(p)
    :: HAS(dead, p) && !HAS(lost, p) -> lost = lost | BIT(p)
    fi
}

#define HAS_STEPS(p) (CAN_STEP(p) || CAN_READ_VOTE(p) || CAN_READ_WITHDRAWAL(p) || CAN_READ_SUCCESS(p) || \
    CAN_READ_FAILURE(p) || CAN_TELL(p) || CAN_REPORT(p) || (losses > 0 && IS_ALIVE(p) && !HAS(lost, p)) || \
    (HAS(dead, p) && !HAS(lost, p)))

init {
    do
    :: atomic {
        if
        :: HAS_STEPS(0) -> steps_of(0)
        :: HAS_STEPS(1) -> steps_of(1)
        :: HAS_STEPS(2) -> steps_of(2)
        :: CAN_EVALUATE -> evaluate()
        :: CAN_JUDGE -> judge()
        :: crashes > 0 && leads -> crash()
        :: !leads && (reported | lost) == ALL -> take_over()
        :: else ->
            assert(HAS_END(0) && HAS_END(1) && HAS_END(2));
            break
        fi;
        assert(!((has_committed || ANY(HAS_RETURNED)) && ANY(IS_DENIED)))
    }
    od
}
