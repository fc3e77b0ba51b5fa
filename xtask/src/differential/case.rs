//! Predicates on a difference, for the table of known differences.

use turnpike_client::ClientTransport;
use turnpike_wire::stun::{kind, method};

use super::{
    compare::What,
    seen::Seen,
    step::{Auth, Damage, Field, Request, Sequence, Step},
};

pub(super) struct Case<'a> {
    pub(super) sequence: &'a Sequence,
    pub(super) at: usize,
    pub(super) what: &'a What,
    /// Request of the step, or the one that the step repeats.
    pub(super) request: Option<&'a Request>,
}

impl Case<'_> {
    pub(super) fn damage(&self) -> Option<Damage> {
        self.request.and_then(|request| request.damage)
    }

    pub(super) fn codes(&self) -> Option<(Option<u16>, Option<u16>)> {
        match self.what {
            What::Code { ours, theirs } => Some((*ours, *theirs)),
            _ => None,
        }
    }

    pub(super) fn ours(&self) -> Option<Option<u16>> {
        self.codes().map(|(ours, _)| ours)
    }

    pub(super) fn theirs(&self) -> Option<Option<u16>> {
        self.codes().map(|(_, theirs)| theirs)
    }

    pub(super) fn has_fact(&self, wanted: &str, by_us: bool) -> bool {
        matches!(self.what, What::Fact { fact, is_ours } if fact == wanted && *is_ours == by_us)
    }

    pub(super) fn has_any_fact(&self, beginning: &str) -> bool {
        matches!(self.what, What::Fact { fact, .. } if fact.starts_with(beginning))
    }

    pub(super) fn is(&self, method: u16) -> bool {
        self.request.is_some_and(|request| request.method == method)
    }

    pub(super) fn has(&self, kind: u16) -> bool {
        self.request.is_some_and(|request| request.has(kind))
    }

    pub(super) fn is_good(&self) -> bool {
        self.request.is_some_and(|request| matches!(request.auth, Auth::Good | Auth::Fresh))
    }

    pub(super) fn is_retransmission(&self) -> bool {
        matches!(self.sequence.steps[self.at], Step::Again(_))
    }

    pub(super) fn only_theirs(&self) -> bool {
        let is_data = |seen: &Seen| matches!(seen, Seen::Data(..) | Seen::Channel(..) | Seen::Relayed(..));
        matches!(self.what, What::Other { ours, theirs } if ours.is_empty() && theirs.iter().all(is_data))
    }

    pub(super) fn earlier(&self) -> impl Iterator<Item = &Request> {
        let client = self.sequence.steps[self.at].client();
        client.into_iter().flat_map(|client| self.sequence.earlier(self.at, client))
    }

    pub(super) fn has_deleted(&self) -> bool {
        let zero = Field::number(kind::LIFETIME, 0);
        self.earlier().any(|request| request.method == method::REFRESH && request.fields.contains(&zero))
    }

    pub(super) fn has_asked_for_more_than_the_maximum(&self) -> bool {
        let is_beyond = |field: &Field| match field {
            Field::Value(kind::LIFETIME, value) => {
                <[u8; 4]>::try_from(&value[..]).is_ok_and(|value| u32::from_be_bytes(value) >= 3_600)
            }
            _ => false,
        };
        self.earlier().any(|request| request.fields.iter().any(is_beyond))
    }

    pub(super) fn has_tried_other_user(&self) -> bool {
        let user = |auth| match auth {
            Auth::OtherUser => 1,
            Auth::UnknownUser => 2,
            _ => 0,
        };
        let now = self.request.map(|request| user(request.auth));
        self.earlier().any(|request| request.auth != Auth::None && Some(user(request.auth)) != now)
    }

    pub(super) fn is_quota_used(&self) -> bool {
        let earlier = &self.sequence.steps[..self.at];
        let has_method =
            |step: &&Step, method| step.request().is_some_and(|request| request.method == method);
        earlier.iter().any(|step| has_method(&step, method::REFRESH) || matches!(step, Step::Leave(_)))
    }

    /// True for data on a shared relay port that went to a different client: turnpike delivers it to the client that has a permission for
    /// the peer.
    pub(super) fn is_anothers(&self) -> bool {
        let what = |seen: &[Seen]| -> Vec<String> { seen.iter().map(|seen| seen.without_client()).collect() };
        match self.what {
            What::Other { ours, theirs } => {
                matches!(self.sequence.steps[self.at], Step::Peer(..)) || what(ours) == what(theirs)
            }
            _ => false,
        }
    }

    pub(super) fn has_asked_for_several(&self) -> bool {
        self.earlier().any(|request| request.method == method::CREATE_PERMISSION && request.fields.len() > 1)
    }

    pub(super) fn is_over(&self, transport: ClientTransport) -> bool {
        let client = self.sequence.steps[self.at].client();
        client.is_some_and(|client| self.sequence.transports[client.0] == transport)
    }

    pub(super) fn has_malformed_peer(&self) -> bool {
        let is_malformed = |field: &Field| matches!(field, Field::Value(kind::XOR_PEER_ADDRESS, _));
        self.request.is_some_and(|request| request.fields.iter().any(is_malformed))
    }

    pub(super) fn has_malformed_flag(&self) -> bool {
        let is_malformed =
            |field: &Field| matches!(field, Field::Value(kind::DONT_FRAGMENT, value) if !value.is_empty());
        self.request.is_some_and(|request| request.fields.iter().any(is_malformed))
    }

    pub(super) fn is_silent_on_unknown_method(&self) -> bool {
        use method::{ALLOCATE, BINDING, CHANNEL_BIND, CONNECT, CONNECTION_BIND, CREATE_PERMISSION, REFRESH};
        const KNOWN: [u16; 7] =
            [ALLOCATE, BINDING, CHANNEL_BIND, CONNECT, CONNECTION_BIND, CREATE_PERMISSION, REFRESH];
        self.ours() == Some(None) && self.request.is_some_and(|request| !KNOWN.contains(&request.method))
    }

    pub(super) fn repeats(&self) -> bool {
        self.request.is_some_and(|request| {
            let kinds = || request.fields.iter().map(super::step::Field::kind);
            let may =
                |kind: u16| kind == kind::XOR_PEER_ADDRESS && request.method == method::CREATE_PERMISSION;
            kinds()
                .enumerate()
                .any(|(at, kind)| !may(kind) && kinds().skip(at + 1).any(|other| other == kind))
        })
    }
}
