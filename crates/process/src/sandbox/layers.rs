//! Restrictions already in effect. The new process of an upgrade inherits Landlock rules and seccomp
//! filters. The kernel allows only 16 rulesets and 32,768 instructions, so an upgrade adds only the missing
//! restrictions.

use std::{
    env,
    hash::{DefaultHasher, Hash, Hasher as _},
};

use turnpike_config::{UPGRADE_SANDBOX_VARIABLE, UPGRADE_VARIABLE};

#[derive(Debug, Default)]
pub(super) struct Layers(Vec<String>);

impl Layers {
    pub(super) fn inherited() -> Self {
        let is_upgrade = env::var_os(UPGRADE_VARIABLE).is_some();
        let digests = env::var(UPGRADE_SANDBOX_VARIABLE).ok().filter(|_| is_upgrade);
        digests.map(|digests| Self::from_variable(&digests)).unwrap_or_default()
    }

    fn from_variable(digests: &str) -> Self {
        Self(digests.split(',').filter(|digest| !digest.is_empty()).map(str::to_owned).collect())
    }

    pub(super) fn add<E>(&mut self, rules: &impl Hash, put: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut hasher = DefaultHasher::new();
        rules.hash(&mut hasher);
        let digest = format!("{:016x}", hasher.finish());
        if !self.0.contains(&digest) {
            put()?;
            self.0.push(digest);
        }
        Ok(())
    }

    pub(super) fn to_variable(&self) -> String {
        self.0.join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restriction_is_applied_once_and_passed_on() {
        let mut count = 0;
        let mut layers = Layers::default();
        let mut add = |layers: &mut Layers, rules: &str| {
            let put = || {
                count += 1;
                Ok::<_, ()>(())
            };
            layers.add(&rules, put).unwrap();
        };
        for rules in ["a", "b", "a"] {
            add(&mut layers, rules);
        }
        layers.add(&"c", || Err(())).unwrap_err();
        let mut next = Layers::from_variable(&layers.to_variable());
        for rules in ["b", "c", "a"] {
            add(&mut next, rules);
        }
        assert_eq!(count, 3, "a failed restriction is not recorded");
        assert_eq!(Layers::from_variable("").0, [""; 0]);
    }
}
