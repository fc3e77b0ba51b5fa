//! What is in force already. Rules of Landlock and filters of seccomp pass on to whoever takes a process's place, and the kernel takes only
//! so many of them: 16 of the former, 32,768 instructions of the latter. So an upgrade adds none that is there.

use std::{
    env,
    hash::{DefaultHasher, Hash, Hasher as _},
};

use turnpike_config::{UPGRADE_SANDBOX_VARIABLE, UPGRADE_VARIABLE};

/// Digests of all that is in force.
#[derive(Debug, Default)]
pub(super) struct Layers(Vec<String>);

impl Layers {
    /// Those of the process whose place this one takes, if it does.
    pub(super) fn inherited() -> Self {
        let heir = env::var_os(UPGRADE_VARIABLE).is_some();
        let told = env::var(UPGRADE_SANDBOX_VARIABLE).ok().filter(|_| heir);
        told.map(|told| Self::told(&told)).unwrap_or_default()
    }

    fn told(told: &str) -> Self {
        Self(told.split(',').filter(|digest| !digest.is_empty()).map(str::to_owned).collect())
    }

    /// Puts `rules` in force, unless they are.
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

    /// For the variable by which the next process hears of them.
    pub(super) fn to_tell(&self) -> String {
        self.0.join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_force_is_put_there_once_and_passed_on() {
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
        let mut next = Layers::told(&layers.to_tell());
        for rules in ["b", "c", "a"] {
            add(&mut next, rules);
        }
        assert_eq!(count, 3, "what failed is not in force");
        assert_eq!(Layers::told("").0, [""; 0]);
    }
}
