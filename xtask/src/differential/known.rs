//! Accepted differences. Any other difference is a bug in turnpike or needs a new row.

use turnpike_client::ClientTransport;
use turnpike_wire::stun::{kind, method};

use super::{
    Kind,
    case::Case,
    compare::{Difference, What},
    seen::Seen,
    servers::Name::{self, Coturn, Pion},
    step::{Damage, Sequence},
};

pub(super) struct Known {
    pub(super) who: &'static [Name],
    pub(super) what: &'static str,
    /// RFC section that decides, or an entry of docs/dev/rfcs.md or docs/serve.md.
    pub(super) why: &'static str,
    applies: fn(&Case<'_>) -> bool,
}

const BOTH: &[Name] = &[Coturn, Pion];

pub(super) const TABLE: &[Known] = &[
    Known {
        who: BOTH,
        what: "signs only some errors, or none",
        why: "RFC 8489 section 9.2.4",
        applies: |case| case.has_fact("integrity", true),
    },
    Known {
        who: &[Pion],
        what: "FINGERPRINT in Binding responses only, and in all of them",
        why: "RFC 8489 section 7: left to the usage",
        applies: |case| case.has_fact("FINGERPRINT", true) || case.has_fact("FINGERPRINT", false),
    },
    Known {
        who: &[Coturn],
        what: "MAPPED-ADDRESS and RESPONSE-ORIGIN in every Binding response",
        why: "rfcs.md: OTHER-ADDRESS, RESPONSE-ORIGIN and MAPPED-ADDRESS",
        applies: |case| case.has_fact("MAPPED-ADDRESS", false) || case.has_fact("RESPONSE-ORIGIN", false),
    },
    Known {
        who: BOTH,
        what: "does not support ADDITIONAL-ADDRESS-FAMILY",
        why: "RFC 8656 section 7.2",
        applies: |case| {
            let refused = case.codes().is_some_and(|(ours, _)| ours == Some(400));
            case.has(kind::ADDITIONAL_ADDRESS_FAMILY)
                && (refused || case.has_fact("XOR-RELAYED-ADDRESS=IPv6", true))
        },
    },
    Known {
        who: &[Coturn],
        what: "accepts channel numbers only up to 0x4FFF, since 4.17",
        why: "rfcs.md: Channel numbers",
        applies: |case| case.is(method::CHANNEL_BIND) && case.codes() == Some((Some(0), Some(400))),
    },
    Known {
        who: &[Coturn],
        what: "443 for ADDITIONAL-ADDRESS-FAMILY in a Refresh",
        why: "RFC 8489 section 6.3: ignored",
        applies: |case| {
            let has = case.has(kind::ADDITIONAL_ADDRESS_FAMILY) && case.is(method::REFRESH);
            has && case.theirs() == Some(Some(443))
        },
    },
    Known {
        who: &[Coturn],
        what: "answers unknown methods",
        why: "RFC 8489 section 6.3: discarded",
        applies: |case| case.is_silent_on_unknown_method(),
    },
    Known {
        who: &[Coturn],
        what: "420 for attributes that belong to other requests; drops indications that contain them",
        why: "RFC 8489 section 6.3: ignored",
        applies: |case| {
            let is_dropped = matches!(case.what, What::Other { theirs, .. } if theirs.is_empty());
            let is_indication =
                case.request.is_some_and(|request| request.indication && request.fields.len() > 2);
            !case.has(0x7F00) && (case.theirs() == Some(Some(420)) || is_indication && is_dropped)
        },
    },
    Known {
        who: &[Coturn],
        what: "accepts any RESERVATION-TOKEN",
        why: "RFC 8656 section 7.2: 508",
        applies: |case| case.has(kind::RESERVATION_TOKEN) && case.ours() == Some(Some(508)),
    },
    Known {
        who: &[Coturn],
        what: "compares the user with that of the session before checking the credentials, even if there is no allocation",
        why: "RFC 8489 section 9.2.4: 401 first; RFC 8656 section 5: 441 is for allocations",
        applies: |case| case.theirs() == Some(Some(441)) && case.ours() != Some(Some(0)),
    },
    Known {
        who: &[Coturn],
        what: "keeps a deleted allocation for some time",
        why: "RFC 8656 section 8.2: deleted immediately",
        applies: |case| {
            let is_ours_gone = case.ours() == Some(Some(437));
            case.has_deleted() && (is_ours_gone || case.theirs() == Some(Some(437)) || case.only_theirs())
        },
    },
    Known {
        who: &[Coturn],
        what: "437 for any user other than the client's first",
        why: "RFC 8489 section 9.2.4: each request is authenticated on its own",
        applies: |case| {
            case.is(method::ALLOCATE) && case.theirs() == Some(Some(437)) && case.has_tried_other_user()
        },
    },
    Known {
        who: &[Coturn],
        what: "still counts a deleted allocation for some time",
        why: "RFC 8656 section 8.2: deleted immediately",
        applies: |case| case.theirs() == Some(Some(486)) && case.is_quota_used(),
    },
    Known {
        who: BOTH,
        what: "no shared relay ports: several clients may have the same peer, and each gets only its own data",
        why: "rfcs.md: Shared relay ports",
        applies: |case| {
            case.sequence.kind == Kind::Shared && (case.ours() == Some(Some(508)) || case.is_anothers())
        },
    },
    Known {
        who: BOTH,
        what: "understands the attributes of ICE",
        why: "RFC 8489 section 14: a server need not understand attributes of other usages",
        applies: |case| case.has(kind::PRIORITY) && (case.ours() == Some(Some(420)) || case.only_theirs()),
    },
    Known {
        who: BOTH,
        what: "ignores a malformed peer address, or answers 443",
        why: "RFC 8656 section 10.2: 400",
        applies: |case| {
            case.is(method::CREATE_PERMISSION) && case.has_malformed_peer() && case.ours() == Some(Some(400))
        },
    },
    Known {
        who: BOTH,
        what: "if a request has two errors, reports the other one",
        why: "RFC 8656 sections 7.2, 10.2 and 12.2: the order is left open",
        applies: |case| match case.codes() {
            Some((Some(403 | 443), Some(403 | 443))) => case.is(method::CREATE_PERMISSION),
            Some((Some(403), Some(400))) => case.is(method::CHANNEL_BIND),
            Some((Some(420), Some(400..))) => true,
            Some((Some(400 | 486), Some(508))) => case.has(kind::RESERVATION_TOKEN),
            _ => false,
        },
    },
    Known {
        who: &[Coturn],
        what: "accepts DONT-FRAGMENT from an IPv4 client with an IPv6 allocation",
        why: "RFC 8656 section 3.7: 420",
        applies: |case| {
            case.has(kind::DONT_FRAGMENT)
                && case.has(kind::REQUESTED_ADDRESS_FAMILY)
                && case.ours() == Some(Some(420))
        },
    },
    Known {
        who: &[Pion],
        what: "508 for LIFETIME 0",
        why: "RFC 8656 section 7.2: the default",
        applies: |case| case.has(kind::LIFETIME) && case.codes() == Some((Some(0), Some(508))),
    },
    Known {
        who: &[Coturn],
        what: "443 even if CHANNEL-NUMBER is missing or the family is malformed",
        why: "RFC 8656 sections 8.2 and 12.2: 400",
        applies: |case| case.codes() == Some((Some(400), Some(443))),
    },
    Known {
        who: &[Coturn],
        what: "400 for an unsupported protocol, and 440 for a malformed family or 400 for an unknown one",
        why: "RFC 8656 section 7.2: 442, 400 and 440",
        applies: |case| {
            case.is(method::ALLOCATE)
                && matches!(case.codes(), Some((Some(442 | 440), Some(400)) | (Some(400), Some(440))))
        },
    },
    Known {
        who: BOTH,
        what: "ignores malformed attributes, or EVEN-PORT with RESERVATION-TOKEN",
        why: "RFC 8656 section 7.2: 400",
        applies: |case| {
            let is_passed_over = matches!(case.codes(), Some((Some(400), Some(0) | None)));
            let is_setup = case.is(method::ALLOCATE) || case.is(method::REFRESH);
            is_passed_over && is_setup || case.only_theirs() && case.has_malformed_flag()
        },
    },
    Known {
        who: &[Coturn],
        what: "437 before checking the credentials",
        why: "RFC 8656 section 7.2: authentication first",
        applies: |case| {
            case.theirs() == Some(Some(437))
                && (case.ours() == Some(Some(438))
                    || matches!(case.ours(), Some(Some(400 | 401))) && !case.is_good())
        },
    },
    Known {
        who: BOTH,
        what: "uses the last of repeated attributes, or answers 400",
        why: "RFC 8489 section 14: the first one",
        applies: |case| case.repeats(),
    },
    Known {
        who: BOTH,
        what: "Connect over UDP or without an allocation: a different code, or no response",
        why: "RFC 6062 section 5.2: 437; 400 and 403 are left open",
        applies: |case| {
            case.is(method::CONNECT)
                && matches!(case.codes(), Some((Some(400 | 437), theirs)) if theirs != Some(0))
        },
    },
    Known {
        who: BOTH,
        what: "accepts attributes after MESSAGE-INTEGRITY",
        why: "RFC 8489 section 14.5: ignored",
        applies: |case| case.damage() == Some(Damage::Behind),
    },
    Known {
        who: &[Coturn],
        what: "the response to a retransmission lacks RESERVATION-TOKEN and contains the remaining LIFETIME",
        why: "RFC 8489 section 6.3.1: the same response",
        applies: |case| {
            case.is_retransmission()
                && (case.has_fact("RESERVATION-TOKEN", true) || case.has_any_fact("LIFETIME="))
        },
    },
    Known {
        who: &[Coturn],
        what: "400 or 403 if there is no allocation",
        why: "RFC 8656 section 5: 437",
        applies: |case| matches!(case.codes(), Some((Some(437), Some(400 | 403)))),
    },
    Known {
        who: &[Pion],
        what: "a RESERVATION-TOKEN is valid for any user, but only over its own transport",
        why: "RFC 8656 section 7.2: from any 5-tuple; and rfcs.md: RESERVATION-TOKEN",
        applies: |case| {
            let codes = matches!(case.codes(), Some((Some(0), Some(508)) | (Some(508), Some(0))));
            codes && case.has(kind::RESERVATION_TOKEN)
        },
    },
    Known {
        who: &[Coturn],
        what: "keeps reading a stream that is neither STUN nor ChannelData, without a response; others close it",
        why: "RFC 8489 section 6.2.2: left open",
        applies: |case| {
            let is = |seen: &[Seen], wanted: fn(&Seen) -> bool| seen.iter().any(wanted);
            matches!(case.what, What::Other { ours, theirs }
                if is(ours, |it| matches!(it, Seen::Closed(_))) && is(theirs, |it| matches!(it, Seen::Deaf(_))))
        },
    },
    Known {
        who: &[Coturn],
        what: "438 before checking the password",
        why: "RFC 8489 section 9.2.4: 401 before 438",
        applies: |case| case.codes() == Some((Some(401), Some(438))),
    },
    Known {
        who: &[Pion],
        what: "the permission of a channel ends after 300 s",
        why: "rfcs.md: Channels keep their permission",
        applies: |case| {
            let is_silent = matches!(case.what, What::Other { theirs, .. } if theirs.is_empty());
            case.sequence.kind == Kind::Time && is_silent
        },
    },
    Known {
        who: &[Pion],
        what: "an allocation with a LIFETIME above an hour ends after ten minutes",
        why: "RFC 8656 section 7.2: between default and maximum",
        applies: |case| {
            case.sequence.kind == Kind::Time
                && case.theirs() == Some(None)
                && case.has_asked_for_more_than_the_maximum()
        },
    },
    Known {
        who: &[Coturn],
        what: "closes a client's connection when its allocation expires",
        why: "RFC 8656 section 5: only the allocation expires",
        applies: |case| {
            let is_closed = |seen: &Seen| matches!(seen, Seen::Closed(_));
            matches!(case.what, What::Other { ours, theirs } if ours.is_empty() && theirs.iter().all(is_closed))
                && case.sequence.kind == Kind::Time
        },
    },
    Known {
        who: &[Pion],
        what: "nonces are valid for an hour, regardless of the configuration",
        why: "RFC 8656 section 5: at most an hour",
        applies: |case| case.sequence.kind == Kind::Time && case.ours() == Some(Some(438)),
    },
    Known {
        who: &[Pion],
        what: "400 instead of 401",
        why: "RFC 8489 section 9.2.4",
        applies: |case| case.codes() == Some((Some(401), Some(400))),
    },
    Known {
        who: &[Pion],
        what: "no response if there is no allocation, or if it is another user's",
        why: "RFC 8656 section 5: 437 and 441; RFC 8489 section 6.3.1: the same response to a retransmission",
        applies: |case| match case.codes() {
            Some((Some(437 | 441), None)) => true,
            Some((Some(0), None)) => case.is_retransmission() && case.is(method::REFRESH),
            _ => false,
        },
    },
    Known {
        who: &[Pion],
        what: "420 for CHANGE-REQUEST without a flag",
        why: "rfcs.md: CHANGE-REQUEST",
        applies: |case| case.has(kind::CHANGE_REQUEST) && case.codes() == Some((Some(0), Some(420))),
    },
    Known {
        who: &[Pion],
        what: "a refused CreatePermission permits the peers listed before the refused one",
        why: "RFC 8656 section 10.2: all or none",
        applies: |case| case.only_theirs() && case.has_asked_for_several(),
    },
    Known {
        who: BOTH,
        what: "no response to a request over DTLS without the magic cookie",
        why: "RFC 8489 section 6.2.3: 500",
        applies: |case| case.damage() == Some(Damage::Cookie) && case.is_over(ClientTransport::Dtls),
    },
    Known {
        who: &[Pion],
        what: "does not answer RFC 3489 clients",
        why: "rfcs.md: RFC 3489",
        applies: |case| case.damage() == Some(Damage::Cookie) && case.is_over(ClientTransport::Udp),
    },
    Known {
        who: &[Pion],
        what: "grants a LIFETIME below the default, and the default if more than an hour is requested",
        why: "RFC 8656 section 7.2: between default and maximum",
        applies: |case| case.has_any_fact("LIFETIME="),
    },
    Known {
        who: &[Pion],
        what: "accepts channel numbers above 0x4FFF, or outside any range",
        why: "RFC 8656 section 12: 0x4000 to 0x4FFF",
        applies: |case| case.is(method::CHANNEL_BIND) && case.ours() == Some(Some(400)),
    },
    Known {
        who: &[Pion],
        what: "does not support DONT-FRAGMENT",
        why: "RFC 8656 section 7.2: left open",
        applies: |case| {
            let is_listed = case.has_any_fact("UNKNOWN-ATTRIBUTES=");
            case.has(kind::DONT_FRAGMENT) && (is_listed || case.theirs() == Some(Some(420)))
        },
    },
    Known {
        who: &[Pion],
        what: "RESERVATION-TOKEN for an EVEN-PORT that reserves nothing",
        why: "RFC 8656 section 18.8",
        applies: |case| case.has(kind::EVEN_PORT) && case.has_fact("RESERVATION-TOKEN", false),
    },
    Known {
        who: &[Pion],
        what: "responds to indications with unknown attributes",
        why: "RFC 8489 section 6.3.2: discarded",
        applies: |case| {
            case.theirs() == Some(Some(420)) && case.request.is_some_and(|request| request.indication)
        },
    },
    Known {
        who: &[Pion],
        what: "401 for a refused peer",
        why: "RFC 8656 section 12.2: 403",
        applies: |case| case.codes() == Some((Some(403), Some(401))),
    },
    Known {
        who: &[Pion],
        what: "treats DTLS as a stream: closes the association on unpadded ChannelData and on messages with a wrong length",
        why: "RFC 8656 section 12.5: datagrams have no padding",
        applies: |case| {
            let is_cut = matches!(case.damage(), Some(Damage::Cut | Damage::Long));
            let ends = matches!(case.what, What::Other { theirs, .. } if theirs.iter().any(Seen::is_end));
            case.is_over(ClientTransport::Dtls) && (is_cut || ends)
        },
    },
    Known {
        who: &[Pion],
        what: "accepts a wrong FINGERPRINT, and bytes after the message",
        why: "RFC 8489 sections 5 and 7",
        applies: |case| matches!(case.damage(), Some(Damage::Fingerprint | Damage::Long)),
    },
];

pub(super) fn known(sequence: &Sequence, difference: &Difference) -> Option<usize> {
    let at = difference.at;
    let request = sequence.request(at);
    let case = Case { sequence, at, what: &difference.what, request };
    TABLE.iter().position(|known| known.who.contains(&difference.who) && (known.applies)(&case))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use turnpike_client::ClientTransport;

    use super::*;
    use crate::{
        differential::step::{Auth, Client, Dialect, Request, Step},
        repository,
    };

    #[test]
    fn every_row_names_an_existing_section_or_entry() {
        let root = repository().expect("the repository");
        let deviations = fs::read_to_string(root.join("docs/dev/rfcs.md")).expect("the file exists");
        for Known { what, why, .. } in TABLE {
            let exists = match why.strip_prefix("rfcs.md: ") {
                Some(entry) => deviations.contains(&format!("**{entry}")),
                None => why.starts_with("RFC ") && why.contains("section"),
            };
            assert!(exists, "{what}: {why}");
        }
    }

    #[test]
    fn a_wrong_code_for_a_valid_request_is_an_unknown_difference() {
        let request = Request::new(method::ALLOCATE, Vec::new(), Auth::Good);
        let sequence = Sequence {
            kind: Kind::Requests,
            transports: vec![ClientTransport::Udp],
            dialect: Dialect::Classic,
            steps: vec![Step::Request(Client(0), request)],
        };
        let of = |who, ours, theirs| {
            known(
                &sequence,
                &Difference { who, at: 0, what: What::Code { ours: Some(ours), theirs: Some(theirs) } },
            )
        };
        for who in [Coturn, Pion, Name::Rfc] {
            assert_eq!(of(who, 437, 438), None);
            assert_eq!(of(who, 400, 401), None);
            assert_eq!(of(who, 500, 0), None);
        }
        assert!(of(Pion, 401, 400).is_some());
        assert_eq!(of(Coturn, 401, 400), None);
    }
}
