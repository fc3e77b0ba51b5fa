//! What must never be printed, marked by its type.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A value that its holder may use and write to where an allocation moves, and nobody sees.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Secret<T>(pub(crate) T);

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// How a [`turnpike_wire::integrity::Key`], which prints itself as little, is written.
pub(crate) mod key {
    use serde::{Deserialize as _, Deserializer, Serializer};
    use turnpike_wire::integrity::Key;

    pub(crate) fn serialize<S: Serializer>(key: &Key, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(key.expose())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Key, D::Error> {
        Vec::<u8>::deserialize(deserializer).map(|bytes| Key::from_bytes(&bytes))
    }
}
