//! Loads programs into the kernel, and retries after temporary failures.

use std::{thread, time::Duration};

use aya::{
    Ebpf,
    programs::{ProgramError, SchedClassifier},
};

use crate::error::{OffloadError, is_passing};

/// Number of attempts, and the pause between them, in which memory may become free.
const ATTEMPTS: u32 = 8;
const PAUSE: Duration = Duration::from_millis(5);

pub(crate) fn load_classifier(object: &mut Ebpf, name: &str) -> Result<(), OffloadError> {
    let program = classifier(object, name)?;
    load_program(|| program.load())?;
    // If the kernel does not report the size, assume that it compiles the program.
    if program.info().is_ok_and(|info| info.size_jitted() == 0) {
        return Err(OffloadError::Interpreted);
    }
    Ok(())
}

pub(crate) fn classifier<'o>(
    object: &'o mut Ebpf,
    name: &str,
) -> Result<&'o mut SchedClassifier, OffloadError> {
    let program = object.program_mut(name).ok_or_else(|| OffloadError::Object(format!("no {name}")))?;
    program.try_into().map_err(OffloadError::program)
}

/// Loads a program, and retries after temporary failures. The kernel gives up if a signal is pending for the
/// thread (EAGAIN) or memory is short; the library then retries with a buffer for the verifier's log, and
/// fails if that is too small (ENOSPC).
pub fn load_program(load: impl FnMut() -> Result<(), ProgramError>) -> Result<(), OffloadError> {
    let passes = |error: &ProgramError| matches!(error, ProgramError::LoadError { io_error, .. } if is_passing(io_error));
    until_judged(load, passes).map_err(OffloadError::program)
}

fn until_judged<E>(mut ask: impl FnMut() -> Result<(), E>, passes: impl Fn(&E) -> bool) -> Result<(), E> {
    for _ in 1..ATTEMPTS {
        match ask() {
            Err(error) if passes(&error) => thread::sleep(PAUSE),
            judged => return judged,
        }
    }
    ask()
}

#[cfg(test)]
mod tests {
    use std::io;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn an_interrupted_verification_is_retried_but_a_refusal_is_not() {
        let mut answers = vec![Ok(()), Err(Errno::NOSPC), Err(Errno::AGAIN)];
        let passes = |errno: &Errno| is_passing(&io::Error::from(*errno));
        until_judged(|| answers.pop().expect("no more attempts than needed"), passes).unwrap();
        assert!(answers.is_empty());

        let ask = |errno| {
            let mut asked = 0;
            let refused = until_judged(
                || {
                    asked += 1;
                    Err(errno)
                },
                passes,
            );
            assert_eq!(refused, Err(errno));
            asked
        };
        assert_eq!(ask(Errno::ACCESS), 1);
        assert_eq!(ask(Errno::AGAIN), ATTEMPTS);
    }
}
