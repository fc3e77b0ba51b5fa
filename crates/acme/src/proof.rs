//! Response to a challenge (RFC 8555 section 8.1).

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChallengeResponse {
    pub(crate) token: String,
    /// Key authorization: the token and a digest of the account's key.
    pub(crate) text: String,
}

impl ChallengeResponse {
    pub(crate) fn digest(&self) -> [u8; 32] {
        Sha256::digest(&self.text).into()
    }

    /// Value of the TXT record for dns-01.
    pub(crate) fn record(&self) -> String {
        BASE64_URL_SAFE_NO_PAD.encode(self.digest())
    }
}
