//! Differences between turnpike and another server in one sequence.

use std::fmt;

use super::{
    message::{Answer, code},
    seen::Seen,
    servers::Name,
    step::{Dialect, Sequence, Step},
};

/// One difference. Later differences in the same sequence may be consequences of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) who: Name,
    pub(super) at: usize,
    pub(super) what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Codes of the responses; 0 for success, `None` if there was no response.
    Code {
        ours: Option<u16>,
        theirs: Option<u16>,
    },
    Fact {
        fact: String,
        is_ours: bool,
    },
    Other {
        ours: Vec<Seen>,
        theirs: Vec<Seen>,
    },
}

impl What {
    /// True if the servers' states differ from here on.
    fn diverges(&self) -> bool {
        match self {
            // A success changes the server's state, and after a 438 the client has a new nonce.
            Self::Code { ours, theirs } => [ours, theirs].iter().any(|code| matches!(code, Some(0 | 438))),
            // This fact differs if one server relays a different address family.
            Self::Fact { fact, .. } => fact.starts_with("XOR-RELAYED-ADDRESS"),
            Self::Other { .. } => true,
        }
    }
}

/// Differences up to and including the first one that makes the two servers' states diverge.
pub(super) fn differences(
    sequence: &Sequence,
    who: Name,
    ours: &[Vec<Seen>],
    theirs: &[Vec<Seen>],
) -> Vec<Difference> {
    let mut found = Vec::new();
    for (at, step) in sequence.steps.iter().enumerate() {
        if theirs[at].iter().any(|seen| matches!(seen, Seen::Failed(..))) {
            break;
        }
        let is_incomparable = sequence.request(at).is_some_and(|request| request.auth.rule().is_some())
            && sequence.dialect != Dialect::Classic;
        if is_incomparable {
            continue;
        }
        let new = differences_at(step, &ours[at], &theirs[at]);
        let diverges = new.iter().any(What::diverges);
        found.extend(new.into_iter().map(|what| Difference { who, at, what }));
        if diverges {
            break;
        }
    }
    found
}

/// Differences from RFC rules that no other server implements.
pub(super) fn from_rules(sequence: &Sequence, ours: &[Vec<Seen>]) -> Vec<Difference> {
    if sequence.dialect == Dialect::Classic {
        return Vec::new();
    }
    let steps = sequence.steps.iter().zip(ours).enumerate();
    let found = steps.filter_map(|(at, (step, seen))| {
        let request = step.request()?;
        let (wanted, _) = request.auth.rule()?;
        if request.indication || request.damage.is_some() || !is_signed(request.method) {
            return None;
        }
        let got = answer(step, seen)?.code;
        let what = What::Code { ours: Some(got), theirs: Some(wanted) };
        (got != wanted).then_some(Difference { who: Name::Rfc, at, what })
    });
    found.collect()
}

fn is_signed(method: u16) -> bool {
    use turnpike_wire::stun::method::{ALLOCATE, CHANNEL_BIND, CREATE_PERMISSION, REFRESH};
    matches!(method, ALLOCATE | CHANNEL_BIND | CREATE_PERMISSION | REFRESH)
}

fn differences_at(step: &Step, ours: &[Seen], theirs: &[Seen]) -> Vec<What> {
    let (our_answer, their_answer) = (answer(step, ours), answer(step, theirs));
    let mut found = Vec::new();
    let codes = [our_answer, their_answer].map(|answer| answer.map(|answer| answer.code));
    if let (Some(ours), Some(theirs)) = (our_answer, their_answer)
        && ours.code == theirs.code
    {
        for (fact, is_ours) in ours
            .facts
            .difference(&theirs.facts)
            .map(|fact| (fact, true))
            .chain(theirs.facts.difference(&ours.facts).map(|fact| (fact, false)))
        {
            found.push(What::Fact { fact: fact.clone(), is_ours });
        }
    } else if codes[0] != codes[1] {
        found.push(What::Code { ours: codes[0], theirs: codes[1] });
    }
    let rest = |seen: &[Seen], answer: Option<&Answer>| -> Vec<Seen> {
        seen.iter().filter(|it| !matches!(it, Seen::Answer(_, it) if Some(it) == answer)).cloned().collect()
    };
    let (ours, theirs) = (rest(ours, our_answer), rest(theirs, their_answer));
    if ours != theirs {
        found.push(What::Other { ours, theirs });
    }
    found
}

fn answer<'a>(step: &Step, seen: &'a [Seen]) -> Option<&'a Answer> {
    let client = step.client()?;
    seen.iter().find_map(|seen| match seen {
        Seen::Answer(from, answer) if *from == client => Some(answer),
        _ => None,
    })
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let told = |answer: &Option<u16>| answer.map_or_else(|| "no response".to_owned(), code);
        let list = |seen: &[Seen]| {
            let told: Vec<String> = seen.iter().map(ToString::to_string).collect();
            if told.is_empty() { "nothing".to_owned() } else { told.join("; ") }
        };
        match self {
            Self::Code { ours, theirs } => {
                write!(f, "turnpike: {}; other server: {}", told(ours), told(theirs))
            }
            Self::Fact { fact, is_ours: true } => write!(f, "only turnpike has {fact}"),
            Self::Fact { fact, is_ours: false } => write!(f, "only the other server has {fact}"),
            Self::Other { ours, theirs } => {
                write!(f, "turnpike: {}; other server: {}", list(ours), list(theirs))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use turnpike_client::ClientTransport;
    use turnpike_wire::stun::method;

    use super::*;
    use crate::differential::{
        Kind,
        step::{Auth, Client, Peer, Request},
    };

    const A: Client = Client(0);

    fn sequence(dialect: Dialect, auth: Auth) -> Sequence {
        let request = |method| Step::Request(A, Request::new(method, Vec::new(), auth));
        let steps = vec![request(method::ALLOCATE), request(method::REFRESH), Step::Peer(Peer::Near, A, 5)];
        Sequence { kind: Kind::Requests, transports: vec![ClientTransport::Udp], dialect, steps }
    }

    fn answered(method: u16, code: u16, facts: &[&str]) -> Vec<Seen> {
        let facts: BTreeSet<String> = facts.iter().map(|&fact| fact.to_owned()).collect();
        vec![Seen::Answer(A, Answer { method, code, facts })]
    }

    fn found(ours: &[Vec<Seen>], theirs: &[Vec<Seen>]) -> Vec<(usize, String)> {
        let sequence = sequence(Dialect::Classic, Auth::Good);
        let found = differences(&sequence, Name::Coturn, ours, theirs);
        found.into_iter().map(|difference| (difference.at, difference.what.to_string())).collect()
    }

    #[test]
    fn equal_behaviour_has_no_difference() {
        let seen =
            [answered(3, 0, &["LIFETIME=600"]), answered(4, 437, &[]), vec![Seen::Data(A, Peer::Near, 5)]];
        assert_eq!(found(&seen, &seen), []);
    }

    #[test]
    fn attributes_codes_missing_responses_and_data_are_compared() {
        let ours = [
            answered(3, 0, &["LIFETIME=600"]),
            answered(4, 443, &["integrity"]),
            vec![Seen::Data(A, Peer::Near, 5)],
        ];
        let theirs = [answered(3, 0, &["LIFETIME=777"]), Vec::new(), Vec::new()];
        let expected = [
            (0, "only turnpike has LIFETIME=600".to_owned()),
            (0, "only the other server has LIFETIME=777".to_owned()),
            (1, "turnpike: 443; other server: no response".to_owned()),
            (2, "turnpike: a gets 5 bytes from near in a Data indication; other server: nothing".to_owned()),
        ];
        assert_eq!(found(&ours, &theirs), expected);
    }

    #[test]
    fn the_comparison_stops_at_an_allocation_that_one_server_refused() {
        let ours = [answered(3, 0, &[]), answered(4, 0, &[]), Vec::new()];
        let theirs = [answered(3, 508, &[]), answered(4, 437, &[]), Vec::new()];
        assert_eq!(found(&ours, &theirs), [(0, "turnpike: success; other server: 508".to_owned())]);
    }

    #[test]
    fn sha_256_is_checked_against_the_rfc_where_servers_lack_it() {
        let sequence = sequence(Dialect::Sha256, Auth::OtherAlgorithms);
        let seen = |code| [answered(3, code, &[]), answered(4, 400, &[]), Vec::new()];
        assert_eq!(from_rules(&sequence, &seen(400)), []);
        let what = What::Code { ours: Some(401), theirs: Some(400) };
        assert_eq!(from_rules(&sequence, &seen(401)), [Difference { who: Name::Rfc, at: 0, what }]);
        assert_eq!(differences(&sequence, Name::Pion, &seen(401), &[Vec::new(), Vec::new(), Vec::new()]), []);
    }
}
