use std::fmt;

use serde::{Deserialize, Serialize};

/// `Debug` hides the value.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Masked<T>(pub(crate) T);

impl<T> fmt::Debug for Masked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Masked(..)")
    }
}

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
