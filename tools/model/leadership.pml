/* Leadership of a run with two masters: the rules of docs/leadership.md, for an exhaustive search by spin.
 *
 * tools/model/check.py compiles and runs it, in several configurations and with one rule broken at a time.
 * docs/model.md says what the model covers, what it leaves out, and why that loses nothing.
 *
 * Peers are bits of a mask; bit 0 has the lowest peer id. A leadership (term, leader) is one byte: term, master, and
 * how often that master was restarted. Lists are numbered by epoch = term * LISTS + count and kept in one table, since
 * a list never changes after it was proposed; messages and peers refer to lists by epoch.
 *
 * There are no channels. The receiver reads a message at once or never. Reading it later would have the same effect,
 * because in between a peer does nothing else on that connection, and acknowledgements only add up. Only Leave is in
 * flight for a while.
 */

/* --- Configuration ------------------------------------------------------------------------------------------------ */

#ifndef PEERS
#define PEERS 3          /* Peers in all. */
#endif
#ifndef MEMBERS
#define MEMBERS 7        /* Mask: members of the first list. The others are newcomers. */
#endif
#ifndef TERMS
#define TERMS 3          /* Terms, including the first. */
#endif
#ifndef LISTS
#define LISTS 3          /* Most lists that one leadership proposes, including its first. */
#endif
#ifndef BREAKS
#define BREAKS 3         /* How often peers turn to the other master. */
#endif
#ifndef CRASHES
#define CRASHES 1        /* Masters that crash and are restarted. */
#endif
#ifndef REVOCATIONS
#define REVOCATIONS 0    /* Keys that one master revokes. */
#endif
#ifndef LEAVES
#define LEAVES 0         /* Members that leave by their own decision. */
#endif
#ifndef OUTCOMES
#define OUTCOMES true    /* false: no attempt is decided, and S1 is not checked. */
#endif
#ifndef HEAL_TERMS
#define HEAL_TERMS 0     /* More terms after the network has healed; 0: it never heals, and L2 is not checked. */
#endif

#define ALL_TERMS (TERMS + HEAL_TERMS)
#define EPOCHS ((ALL_TERMS + 1) * LISTS)
#define FIRST LISTS      /* Epoch of the list that is committed at the start. */

/* --- State -------------------------------------------------------------------------------------------------------- */

#define CANDIDATE 1
#define LEADER 2

byte at;                 /* Mask: connected to b; the others are connected to a. */
byte promised[PEERS];
byte accepted[PEERS];    /* Epoch; 0: no list. */
byte known;              /* Mask: knows that the accepted list is committed. */
byte heard[PEERS];       /* The outcome of the attempt; 0: none yet. */
byte gone;               /* Mask: has left. */

byte role[2];
byte term[2];
byte restarts[2];
byte reported[2];        /* Mask: has promised the present leadership, and its report is here. */
byte chosen[2];          /* Candidate: list to adopt, if there are quorums to lead it; else 0. */
byte known_list[2];      /* Last list known to be committed. */
byte current[2];         /* Leader: its list; committed if it is known_list. */
byte fixed[2];           /* Leader: its first list, while only that list may be committed; else 0. */
byte acknowledged[2];    /* Mask: of the current list. */
byte left[2];            /* Mask: said Leave to this leadership. */
byte leaving[2];         /* Mask: said Leave, and the master has not read it yet. */
byte revoked[2];         /* Mask. */
byte decided[2];         /* The outcome; 0: none yet. */
byte of_epoch[2 * PEERS];   /* From the reports that a candidate has. */
byte of_heard[2 * PEERS];   /* From these reports, also at a leader. */

byte members[EPOCHS];
byte parent[EPOCHS];

byte breaks = BREAKS;
byte crashes = CRASHES;
byte revocations = REVOCATIONS;
byte leaves = LEAVES;
bit healed;
/* Only the checks read these. */
byte adopted[ALL_TERMS + 1];   /* The list that the first list of a term repeats; 0: nobody led that term. */
byte newest = FIRST;           /* The newest list that was committed. */

hidden byte i, e, f, best, highest;   /* Within one step. */

#define BIT(p) (1 << (p))
#define HAS(s, p) (((s) >> (p)) & 1)
#define WITHOUT(s, p) ((s) & ~BIT(p))
#define COUNT(s) (((s) & 1) + (((s) >> 1) & 1) + (((s) >> 2) & 1) + (((s) >> 3) & 1) + (((s) >> 4) & 1))
#define LOWEST(s) ((s) & (-(s)))
#define LINK(m, p) ((m) * PEERS + (p))
#define EVERYBODY (BIT(PEERS) - 1)
#define NEWCOMERS (EVERYBODY & ~MEMBERS)

#define LEADERSHIP(m) ((term[m] << 3) | ((m) << 2) | restarts[m])
#define TERM_OF(leadership) ((leadership) >> 3)
#define TERM_LIMIT (TERMS + (healed -> HEAL_TERMS : 0))
#define IS_COMMITTED(m) (current[m] == known_list[m])
#define IS_AT(p, m) (HAS(at, p) == (m) && !HAS(gone, p))
#define CONNECTED(m) (((m) -> at : EVERYBODY & ~at) & ~gone)

#define IS_PRESENT(p, m) (IS_AT(p, m) && promised[p] == LEADERSHIP(m))
#if PEERS > 3
#define PRESENT(m) (IS_PRESENT(0, m) | IS_PRESENT(1, m) << 1 | IS_PRESENT(2, m) << 2 | IS_PRESENT(3, m) << 3)
#else
#define PRESENT(m) (IS_PRESENT(0, m) | IS_PRESENT(1, m) << 1 | IS_PRESENT(2, m) << 2)
#endif

/* A quorum of a list: a majority, or half of it with the lowest peer id. */
#define IS_QUORUM(s, l) \
    (2 * COUNT((s) & (l)) > COUNT(l) || (2 * COUNT((s) & (l)) == COUNT(l) && ((s) & (l) & LOWEST(l)) != 0))

/* --- Rules, and how they are broken ------------------------------------------------------------------------------- */

/* promise */
#ifdef BREAK_PROMISE_DOWN
#define MAY_PROMISE(p, m) (true)
#elif defined(BREAK_TERM_TWICE)
#define MAY_PROMISE(p, m) (TERM_OF(promised[p]) <= term[m])
#else
#define MAY_PROMISE(p, m) (TERM_OF(promised[p]) < term[m] || promised[p] == LEADERSHIP(m))
#endif

/* obey */
#ifdef BREAK_UNPROMISED_TERM
#define OBEYS(p, m) (HAS(reported[m], p) && TERM_OF(promised[p]) <= term[m])
#else
#define OBEYS(p, m) (HAS(reported[m], p) && promised[p] == LEADERSHIP(m))
#endif

/* elect: which peers count */
#ifdef BREAK_COUNT_HELD
#define HAVE_PROMISED(m) (reported[m] | CONNECTED(m))
#else
#define HAVE_PROMISED(m) (reported[m])
#endif

/* elect: the lists of which they must be quorums */
#ifdef BREAK_ELECT_WITHOUT_OLD
#define ARE_ELECTING(s, l, old) IS_QUORUM(s, members[l])
#else
#define ARE_ELECTING(s, l, old) (IS_QUORUM(s, members[l]) && IS_QUORUM(s, members[old]))
#endif

/* elect: a promise for which a candidate or a leader must ask in a higher term */
#ifdef BREAK_EQUAL_TERM
#define OUTBIDS(p, m) (TERM_OF(promised[p]) > term[m])
#else
#define OUTBIDS(p, m) (TERM_OF(promised[p]) >= term[m] && promised[p] != LEADERSHIP(m))
#endif

/* step_down: the peers whose promise counts */
#ifdef BREAK_MEMBERS_ALONE_DEPOSE
#define MAY_DEPOSE(p, m) (HAS(members[current[m]], p))
#else
#define MAY_DEPOSE(p, m) (true)
#endif

/* commit: which peers count without an acknowledgement */
#ifdef BREAK_REVOKED_CONSENTS
#define CONSENTING(m) (left[m] | revoked[m])
#else
#define CONSENTING(m) (left[m])
#endif

/* commit: the lists of which they must be quorums */
#ifdef BREAK_NEW_QUORUM_ALONE
#define ARE_OLD_QUORUM(s, m) (true)
#else
#define ARE_OLD_QUORUM(s, m) IS_QUORUM(s, members[known_list[m]])
#endif
#ifdef BREAK_OLD_QUORUM_ALONE
#define ARE_NEW_QUORUM(s, m) (true)
#else
#define ARE_NEW_QUORUM(s, m) IS_QUORUM(s, members[current[m]])
#endif
#define ARE_QUORUMS(s, m) (ARE_OLD_QUORUM(s, m) && ARE_NEW_QUORUM(s, m))

/* propose: no other list while the adopted one may have been committed elsewhere */
#ifdef BREAK_CHANGE_BEFORE_COMMIT
#define MAY_PROPOSE(m) (role[m] == LEADER && current[m] % LISTS < LISTS - 1)
#else
#define MAY_PROPOSE(m) (role[m] == LEADER && current[m] % LISTS < LISTS - 1 && !fixed[m])
#endif

/* decide */
#define MISSING(m) (members[current[m]] & MEMBERS & ~reported[m])
#ifdef BREAK_DECIDE_UNCOMMITTED
#define MAY_DECIDE(m) (!MISSING(m))
#else
#ifdef BREAK_DECIDE_UNREPORTED
#define MAY_DECIDE(m) (IS_COMMITTED(m))
#else
#define MAY_DECIDE(m) (IS_COMMITTED(m) && !MISSING(m))
#endif
#endif

/* propose: the peers that the list may drop; with the option also a connected peer that lost its link to another peer,
 * or that keeps others waiting
 */
#ifdef LOSE_CONNECTED
#define MAY_LOSE(m, p) (!healed || !IS_AT(p, m))
#else
#define MAY_LOSE(m, p) (!IS_AT(p, m))
#endif

/* propose: the peers that receive and acknowledge a list that is not committed: its members, and the old ones. */
#ifdef BREAK_OLD_MEMBERS_NOT_TOLD
#define ARE_TOLD(m) (members[current[m]])
#else
#define ARE_TOLD(m) (members[current[m]] | members[known_list[m]])
#endif

/* propose: once the list is committed, a peer that is not in it gets a Kick, and answers Leave. */
#ifdef BREAK_KICK_EARLY
#define MAY_KICK(m) (true)
#else
#define MAY_KICK(m) IS_COMMITTED(m)
#endif

/* --- Checks ------------------------------------------------------------------------------------------------------- */

/* S3: a list that a leadership adopted and repeated is the same list, although it has another epoch. */
#define SAME_AS(l) (((l) % LISTS == 0 && (l) > FIRST) -> adopted[(l) / LISTS] : (l))

/* S3: of two committed lists one descends from the other. */
inline check_chain(l) {
    e = SAME_AS(l);
    f = newest;
    if
    :: e < f -> e = newest; f = SAME_AS(l)
    :: else -> newest = e
    fi;
    do
    :: e > f -> e = SAME_AS(parent[e])
    :: else -> break
    od;
    assert(e == f /* S3: committed lists are one chain */)
}

/* S1, L3: members of the newest committed list have heard one outcome, or none. */
inline check_outcomes() {
    e = 0;
    for (i : 0 .. PEERS - 1) {
        if
        :: HAS(members[newest], i) && heard[i] && e ->
            assert(heard[i] == e /* S1: members heard different outcomes */)
        :: HAS(members[newest], i) && heard[i] && !e -> e = heard[i]
        :: else
        fi
    }
}

/* --- What masters do ---------------------------------------------------------------------------------------------- */

/* descend, elect: the list to adopt, and whether the peers that have promised are enough. */
inline choose(m) {
    highest = 0;
    best = 0;
    for (i : 0 .. PEERS - 1) {
        e = of_epoch[LINK(m, i)];
        if
        :: HAS(reported[m], i) && e ->
            f = ((of_heard[LINK(m, i)] & 128) -> e : parent[e]);
            highest = (f > highest -> f : highest)
        :: else
        fi
    }
    best = highest;
    for (i : 0 .. PEERS - 1) {
        e = of_epoch[LINK(m, i)];
        if
#ifdef BREAK_LARGEST_NUMBER
        :: HAS(reported[m], i) && e > best -> best = e
#else
        :: HAS(reported[m], i) && e > best && (parent[e] == highest || members[e] == members[highest]) -> best = e
#endif
        :: else
        fi
    }
    known_list[m] = highest;
    if
    :: best && ARE_ELECTING(HAVE_PROMISED(m), best, highest) -> chosen[m] = best
    :: else -> chosen[m] = 0
    fi;
    if
    :: !chosen[m] -> known_list[m] = 0
    :: else
    fi
}

inline say_leave(m, p) {
    gone = gone | BIT(p);
    leaving[m] = leaving[m] | BIT(p);
    printf("%c leaves %c\n", 112 + p, 97 + m)
}

inline forget_reports(m) {
    reported[m] = 0;
    chosen[m] = 0;
    known_list[m] = 0;
    for (i : 0 .. PEERS - 1) {
        of_epoch[LINK(m, i)] = 0;
        of_heard[LINK(m, i)] = 0
    }
}

inline become_candidate(m, new_term) {
    term[m] = new_term;
    role[m] = CANDIDATE;
    forget_reports(m);
    current[m] = 0;
    fixed[m] = 0;
    acknowledged[m] = 0;
    left[m] = 0;
    leaving[m] = 0;
    decided[m] = 0
}

/* propose: the list is `current`. Parent and old members are those of the last list known to be committed. */
inline propose(m, the_members) {
    members[current[m]] = the_members;
    parent[current[m]] = known_list[m];
    printf("%c proposes list %d: members %x, parent %d\n", 97 + m, current[m], the_members, known_list[m]);
#ifndef BREAK_STALE_ACKNOWLEDGEMENT
    acknowledged[m] = 0
#else
    skip
#endif
}

/* commit */
inline commit(m) {
    if
    :: !IS_COMMITTED(m) && ARE_QUORUMS(acknowledged[m] | CONSENTING(m), m) ->
        printf("%c commits list %d\n", 97 + m, current[m]);
        check_chain(current[m]);
        known_list[m] = current[m];
        acknowledged[m] = 0;
        fixed[m] = 0;
        check_outcomes()
    :: else
    fi
}

/* One for each master. */
proctype master(byte m) {
end:
    do
    /* elect: it leads in exactly the promised term; after the network has healed, with the peers that are present. */
    :: d_step {
        role[m] == CANDIDATE && chosen[m] &&
            (!healed || ARE_ELECTING(PRESENT(m), chosen[m], known_list[m])) ->
#ifdef BREAK_UNPROMISED_TERM
        term[m] = (term[m] < TERM_LIMIT -> term[m] + 1 : term[m]);
#endif
#ifndef OUTCOMES_ONLY
        assert(!adopted[term[m]] /* a term has one leadership at most */);
        for (i : 0 .. PEERS - 1) {
            if
            :: HAS(HAVE_PROMISED(m), i) -> assert(TERM_OF(promised[i]) >= term[m] /* who counts has promised */)
            :: else
            fi
        }
#endif
        role[m] = LEADER;
        current[m] = term[m] * LISTS;
        adopted[term[m]] = SAME_AS(chosen[m]);
        fixed[m] = (chosen[m] != known_list[m]);
        propose(m, members[chosen[m]]);
        printf("%c leads term %d, adopts list %d\n", 97 + m, term[m], chosen[m]);
        chosen[m] = 0;
        for (i : 0 .. PEERS - 1) {
            of_epoch[LINK(m, i)] = 0;
            of_heard[LINK(m, i)] = of_heard[LINK(m, i)] & 127
        };
        skip
       }

    /* step_down: the remaining peers cannot be quorums. */
    :: d_step {
        role[m] == LEADER && term[m] < TERM_LIMIT && !ARE_QUORUMS(CONNECTED(m) | CONSENTING(m), m) ->
        become_candidate(m, term[m] + 1);
        printf("%c steps down, for want of quorums\n", 97 + m)
       }

    /* A crash. The master is restarted at once: to a peer, a master that is down looks like one that it has not reached
     * yet. Its peers wait for it, or turn to the other one.
     */
    :: d_step {
        crashes && !healed && (role[m] == LEADER || reported[m]) && restarts[m] < 3 ->
        crashes--;
        restarts[m]++;
        become_candidate(m, 0);
        printf("%c crashes, and is restarted\n", 97 + m)
       }
    :: d_step {
        crashes && !healed && (role[m] == LEADER || reported[m]) && restarts[m] < 3 ->
        crashes--;
        restarts[m]++;
        become_candidate(m, 0);
        at = (m -> 0 : EVERYBODY);
        printf("%c crashes, and is restarted; its peers turn to the other one\n", 97 + m)
       }
    od
}

/* One for each master and each peer: their connection, its messages, and what the master does about that peer. */
proctype link(byte m; byte p) {
end:
    do
    /* --- The connection ------------------------------------------------------------------------------------------ */

    /* It breaks, and the peer turns to the other master. */
    :: d_step {
        IS_AT(p, m) && breaks && !healed && !HAS(revoked[1 - m], p) ->
        breaks--;
        at = at ^ BIT(p);
        printf("%c loses %c, and turns to the other one\n", 112 + p, 97 + m)
       }
    /* --- What the peer does --------------------------------------------------------------------------------------- */

    /* promise, and report */
    :: d_step {
        IS_AT(p, m) && term[m] && !HAS(reported[m], p) && MAY_PROMISE(p, m) ->
        promised[p] = LEADERSHIP(m);
        reported[m] = reported[m] | BIT(p);
        of_heard[LINK(m, p)] = heard[p];
        printf("%c promises term %d to %c, reports list %d (known: %d) and outcome %d\n", 112 + p, term[m], 97 + m,
            accepted[p], HAS(known, p), heard[p]);
        if
        :: role[m] == CANDIDATE ->
            of_epoch[LINK(m, p)] = accepted[p];
            of_heard[LINK(m, p)] = heard[p] | (HAS(known, p) << 7);
            choose(m)
        :: else
        fi;
        skip
       }
#ifdef LOST_REPORTS
    :: d_step {
        IS_AT(p, m) && breaks && !healed && term[m] && !HAS(reported[m], p) && MAY_PROMISE(p, m) &&
            promised[p] != LEADERSHIP(m) ->
        promised[p] = LEADERSHIP(m);
        printf("%c promises term %d to %c, and its report is lost\n", 112 + p, term[m], 97 + m)
       }
#endif

    /* accept, */
    :: d_step {
        IS_AT(p, m) && role[m] == LEADER && OBEYS(p, m) && HAS(ARE_TOLD(m), p) && accepted[p] < current[m] ->
#ifdef BREAK_UNPROMISED_TERM
        promised[p] = LEADERSHIP(m);
#endif
        known = WITHOUT(known, p);
        accepted[p] = current[m];
        printf("%c accepts list %d of %c\n", 112 + p, current[m], 97 + m)
       }
    /* and acknowledge; again, if the acknowledgement was lost */
    :: d_step {
        IS_AT(p, m) && role[m] == LEADER && OBEYS(p, m) && accepted[p] == current[m] && !IS_COMMITTED(m) &&
            !HAS(acknowledged[m], p) ->
        acknowledged[m] = acknowledged[m] | BIT(p);
        printf("%c acknowledges list %d to %c\n", 112 + p, current[m], 97 + m);
        commit(m);
        skip
       }

    /* It hears that its list is committed, */
    :: d_step {
        IS_AT(p, m) && role[m] == LEADER && OBEYS(p, m) && accepted[p] == current[m] && IS_COMMITTED(m) &&
            !HAS(known, p) ->
        known = known | BIT(p);
        skip
       }

    /* and the outcome, after the list under which it was decided. decide: the outcome that one of the members has
     * heard; if none has, each leadership decides a different one.
     */
    :: d_step {
        IS_AT(p, m) && role[m] == LEADER && OBEYS(p, m) && accepted[p] == current[m] && HAS(MEMBERS, p) && !heard[p] &&
            OUTCOMES && (decided[m] || MAY_DECIDE(m)) ->
        if
        :: !decided[m] ->
            decided[m] = term[m];
            for (i : 0 .. PEERS - 1) {
                if
                :: HAS(members[current[m]], i) && of_heard[LINK(m, i)] -> decided[m] = of_heard[LINK(m, i)]
                :: else
                fi
            };
            printf("%c decides: outcome %d, under list %d\n", 97 + m, decided[m], current[m])
        :: else
        fi;
        heard[p] = decided[m];
        printf("%c hears outcome %d from %c\n", 112 + p, decided[m], 97 + m);
        check_outcomes();
        skip
       }

    /* It hears that it is no longer a member (Kick), */
    :: d_step {
        IS_AT(p, m) && role[m] == LEADER && OBEYS(p, m) && !HAS(members[current[m]], p) && accepted[p] &&
            MAY_KICK(m) ->
        say_leave(m, p);
        skip
       }

    /* or leaves by its own decision. */
    :: d_step {
        leaves && !healed && IS_AT(p, m) && role[m] == LEADER && OBEYS(p, m) && HAS(members[current[m]], p) ->
        leaves--;
        say_leave(m, p);
        skip
       }

    /* --- What the master does ------------------------------------------------------------------------------------- */

    :: d_step {
        HAS(leaving[m], p) && role[m] == LEADER ->
        leaving[m] = WITHOUT(leaving[m], p);
        left[m] = left[m] | BIT(p);
        commit(m);
        skip
       }

    /* elect: a peer has promised a higher term, or the same term to another leadership: the master asks all again. */
    :: d_step {
        IS_AT(p, m) && role[m] == CANDIDATE && promised[p] && OUTBIDS(p, m) && TERM_OF(promised[p]) < TERM_LIMIT ->
        become_candidate(m, TERM_OF(promised[p]) + 1);
        printf("%c hears of the promise of %c, and asks for term %d\n", 97 + m, 112 + p, term[m])
       }

    /* step_down: a peer has a higher promise. If it is not a member, it could not even hear so: it obeys others. */
    :: d_step {
        IS_AT(p, m) && role[m] == LEADER && MAY_DEPOSE(p, m) && promised[p] && OUTBIDS(p, m) &&
            TERM_OF(promised[p]) < TERM_LIMIT ->
        become_candidate(m, TERM_OF(promised[p]) + 1);
        printf("%c hears of the promise of %c, and asks for term %d\n", 97 + m, 112 + p, term[m])
       }

    /* propose: a member is lost, */
    :: d_step {
        MAY_PROPOSE(m) && HAS(members[current[m]], p) && MAY_LOSE(m, p) &&
            ARE_QUORUMS(CONNECTED(m) | CONSENTING(m), m) && WITHOUT(members[current[m]], p) ->
        current[m]++;
        propose(m, WITHOUT(members[current[m] - 1], p));
        skip
       }

    /* or a newcomer is admitted. */
    :: d_step {
        MAY_PROPOSE(m) && !HAS(members[current[m]], p) && HAS(reported[m], p) && IS_AT(p, m) && !accepted[p] ->
        current[m]++;
        propose(m, members[current[m] - 1] | BIT(p));
        skip
       }

    /* Its list of keys changes; the other master's list does not change yet. */
    :: d_step {
        revocations && !healed && !HAS(revoked[m], p) ->
        revocations--;
        revoked[m] = revoked[m] | BIT(p);
        at = (m -> at & ~BIT(p) : at | BIT(p));
        skip
       }
    od
}

/* --- L2 ----------------------------------------------------------------------------------------------------------- */

#define IS_SERVED(p, m) \
    (HAS(gone | revoked[0] | revoked[1], p) || (HAS(NEWCOMERS, p) && !accepted[p]) || \
     (IS_AT(p, m) && HAS(members[current[m]], p) && accepted[p] == current[m] && HAS(known, p)  && \
         (heard[p] || HAS(NEWCOMERS, p))))

/* From some point on nothing fails, and all peers meet at one of the masters. When nothing is left to do, one master
 * leads them all under a committed list, and their call has ended; unless the peers that have not left are no longer a
 * quorum.
 */
proctype network() {
    if
    :: d_step { at = 0; healed = 1 }
    :: d_step { at = EVERYBODY; healed = 1 }
    fi;
    timeout;
    for (i : 0 .. PEERS - 1) {
        assert(!IS_QUORUM(EVERYBODY & ~gone, members[newest]) ||
            (role[0] == LEADER && IS_COMMITTED(0) && IS_SERVED(i, 0)) ||
            (role[1] == LEADER && IS_COMMITTED(1) && IS_SERVED(i, 1)) /* L2: led, and the call has ended */)
    }
}

init {
    byte n;
    d_step {
        members[FIRST] = MEMBERS;
        adopted[1] = FIRST;
        for (i : 0 .. PEERS - 1) {
            promised[i] = (HAS(MEMBERS, i) -> 8 : 0);
            accepted[i] = (HAS(MEMBERS, i) -> FIRST : 0)
        }
        known = MEMBERS;
        role[0] = LEADER;
        role[1] = CANDIDATE;
        term[0] = 1;
        reported[0] = MEMBERS;
        known_list[0] = FIRST;
        current[0] = FIRST
    }
    atomic {
        run master(0);
        run master(1);
        do
        :: n < PEERS -> run link(0, n); run link(1, n); n++
        :: else -> break
        od;
#if HEAL_TERMS > 0
        run network()
#endif
    }
}
