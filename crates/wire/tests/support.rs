//! Signed messages and messages with a FINGERPRINT, for the tests.

use turnpike_wire::{
    integrity::{IntegrityError, Key, Mac},
    stun::{HEADER_LEN, Header, Invalid, View, Writer},
};

/// Signs a message, ignoring its length field.
pub(crate) fn signed(message: &[u8], key: &Key, mac: Mac) -> Vec<u8> {
    continued(message, |writer| _ = writer.sign(key, mac), false)
}

pub(crate) fn fingerprinted(message: &[u8]) -> Vec<u8> {
    continued(message, |_| (), true)
}

/// Like [`View::verify`]; an invalid message is `Malformed`.
pub(crate) fn verify(message: &[u8], key: &Key, mac: Mac) -> Result<(), IntegrityError> {
    View::new_checked(message).map_err(|_| IntegrityError::Malformed)?.verify(key, mac)
}

pub(crate) fn mac_of(message: &[u8]) -> Option<Mac> {
    View::new_checked(message).ok()?.mac()
}

pub(crate) fn has_fingerprint(message: &[u8]) -> Result<bool, Invalid> {
    View::new_checked(message).map(|view| view.has_fingerprint())
}

fn continued(message: &[u8], with: impl FnOnce(&mut Writer<'_>), fingerprint: bool) -> Vec<u8> {
    let (header, attributes) = message.split_first_chunk::<HEADER_LEN>().unwrap();
    let [t0, t1, _, _, _, _, _, _, transaction @ ..] = *header;
    let mut buffer = Vec::new();
    let mut writer = Writer::begin(&mut buffer, Header::of_type(u16::from_be_bytes([t0, t1]), transaction));
    with(writer.raw(attributes));
    writer.finish(fingerprint);
    buffer
}
