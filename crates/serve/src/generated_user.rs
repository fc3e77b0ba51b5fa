//! The user generated for a server without users.

use turnpike_config::{ConfiguredUser, Secret, UserSecret};

const NAME: &str = "turnpike";

pub(crate) fn random_user() -> ConfiguredUser {
    ConfiguredUser { name: NAME.to_owned(), secret: UserSecret::Password(random_password()) }
}

/// 128 random bits as hex digits.
pub fn random_password() -> Secret {
    Secret::new(hex::encode(rand::random::<[u8; 16]>()))
}

#[cfg(test)]
mod tests {
    use turnpike_testkit::randomness;

    use super::*;

    #[test]
    fn generated_passwords_pass_randomness_tests() {
        let password = || match random_user().secret {
            UserSecret::Password(password) => hex::decode(password.reveal()).expect("hex digits"),
            UserSecret::Keys(_) => panic!("not a password"),
        };
        let passwords: Vec<_> = std::iter::repeat_with(password).take(randomness::SAMPLES).collect();
        randomness::judge(&passwords, &[0xFF; 16]).unwrap();
    }
}
