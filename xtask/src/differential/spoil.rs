//! Introduces one fault into a request: a wrong credential, attribute or byte.

use rand::{Rng as _, seq::IndexedRandom as _};
use turnpike_wire::stun::{FAMILY_IPV4, kind, method};

use super::{
    generate::{Generator, UDP, family},
    step::{Auth, Damage, Field, Peer, Request},
};

impl Generator {
    pub(super) fn spoil(&mut self, request: &mut Request) {
        match self.random.random_range(0..10) {
            0..=3 => {
                request.auth = self.pick(&[
                    Auth::None,
                    Auth::OtherUser,
                    Auth::WrongPassword,
                    Auth::UnknownUser,
                    Auth::WrongRealm,
                    Auth::WrongNonce,
                    Auth::WithoutNonce,
                    Auth::WithoutRealm,
                    Auth::WithoutUser,
                    Auth::Unsigned,
                    Auth::Broken,
                    Auth::Fresh,
                    Auth::WithoutAlgorithms,
                    Auth::WithoutAlgorithm,
                    Auth::OtherAlgorithms,
                    Auth::UnlistedAlgorithm,
                ]);
            }
            4 => {
                request.damage = Some(self.pick(&[
                    Damage::Response,
                    Damage::Cookie,
                    Damage::Cut,
                    Damage::Long,
                    Damage::Fingerprint,
                    Damage::Behind,
                ]));
            }
            5 => request.method = self.pick(&[method::DATA, method::SEND, 0x00D, 0x123, method::CONNECT]),
            6 => request.indication = true,
            _ => self.spoil_fields(request),
        }
    }

    pub(super) fn spoil_fields(&mut self, request: &mut Request) {
        let some = (!request.fields.is_empty()).then(|| self.random.random_range(0..request.fields.len()));
        match (self.random.random_range(0..6), some) {
            (0, Some(at)) => _ = request.fields.remove(at),
            (1, Some(at)) => request.fields.push(request.fields[at].clone()),
            (2, Some(at)) => {
                let kind = request.fields[at].kind();
                let length = self.pick(&[0, 1, 3, 4, 5, 8, 12, 20]);
                request.fields[at] = Field::Value(kind, vec![0; length]);
            }
            (3, Some(at)) => {
                if let Field::Value(_, value) = &mut request.fields[at]
                    && !value.is_empty()
                {
                    let byte = self.random.random_range(0..value.len());
                    value[byte] = self.random.random();
                }
            }
            (4, _) => {
                // Adds an undefined attribute, comprehension-required or comprehension-optional, or one that belongs in a different
                // request.
                let field = self.pick_field();
                let at = self.random.random_range(0..=request.fields.len());
                request.fields.insert(at, field);
            }
            _ => request.fields.push(Field::Peer(Peer::Denied)),
        }
    }

    fn pick_field(&mut self) -> Field {
        let fields = [
            Field::Value(0x7F00, vec![1, 2, 3]),
            Field::Value(0xFF00, vec![1, 2, 3]),
            Field::Value(kind::REQUESTED_TRANSPORT, vec![UDP, 0, 0, 0]),
            Field::Value(kind::REQUESTED_TRANSPORT, vec![99, 0, 0, 0]),
            Field::Value(kind::REQUESTED_TRANSPORT, vec![6, 0, 0, 0]),
            Field::Value(kind::DONT_FRAGMENT, Vec::new()),
            Field::Value(kind::EVEN_PORT, vec![0x80]),
            Field::Token,
            Field::number(kind::LIFETIME, 0),
            Field::number(kind::LIFETIME, 777),
            family(kind::REQUESTED_ADDRESS_FAMILY, FAMILY_IPV4),
            family(kind::REQUESTED_ADDRESS_FAMILY, 3),
            family(kind::ADDITIONAL_ADDRESS_FAMILY, FAMILY_IPV4),
            Field::Value(kind::PRIORITY, vec![0; 4]),
            Field::Value(kind::CHANGE_REQUEST, vec![0; 4]),
            Field::Value(kind::MAPPED_ADDRESS, vec![0, 1, 0, 9, 127, 0, 0, 1]),
            Field::Value(kind::ERROR_CODE, vec![0, 0, 4, 0]),
            Field::Data(5),
        ];
        fields.choose(&mut self.random).cloned().unwrap_or(Field::Token)
    }
}
