//! Balanced order of the subjects within each round, derived from a recorded seed.
//!
//! Machines drift (heat, page cache, neighbours), so no subject may always come first, or always follow one particular other subject.
//! Rounds come in blocks; within a block each subject takes each position and follows each other subject equally often (a Williams square).
//! The choice of the square and the order of its rows are random.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

/// Order of the subjects (indices below `subjects`) in each round.
///
/// Deterministic on every machine. A plan for fewer rounds is a prefix of a longer one, so rounds can be
/// added to an experiment.
pub fn plan(seed: u64, subjects: usize, rounds: u32) -> Vec<Vec<usize>> {
    let rounds = rounds as usize;
    if subjects == 0 {
        return vec![Vec::new(); rounds];
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut plan = Vec::with_capacity(rounds);
    while plan.len() < rounds {
        plan.extend(block(&mut rng, subjects));
    }
    plan.truncate(rounds);
    plan
}

/// Balanced block of `subjects` rounds. If that number is odd, the block is twice as long, because it then also needs the mirror image of
/// each round.
fn block(rng: &mut ChaCha8Rng, subjects: usize) -> Vec<Vec<usize>> {
    let mut names: Vec<usize> = (0..subjects).collect();
    names.shuffle(rng);

    let first = zigzag(subjects);
    let mut rows: Vec<Vec<usize>> = (0..subjects)
        .map(|shift| first.iter().map(|place| names[(place + shift) % subjects]).collect())
        .collect();
    if subjects % 2 == 1 && subjects > 1 {
        let mirrored: Vec<Vec<usize>> = rows.iter().map(|row| row.iter().rev().copied().collect()).collect();
        rows.extend(mirrored);
    }
    rows.shuffle(rng);
    rows
}

/// 0, 1, n-1, 2, n-2, …: the differences of consecutive values take every value modulo n, which balances the
/// square.
fn zigzag(n: usize) -> Vec<usize> {
    (0..n).map(|i| if i % 2 == 1 { i.div_ceil(2) } else { (n - i / 2) % n }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_a_seed_never_changes() {
        let expected = plan(42, 3, 12);
        assert_eq!(plan(42, 3, 12), expected);
        assert_ne!(plan(43, 3, 12), expected);
        // The expected plan is fixed, so that a different random generator cannot silently change what `lab rerun` repeats.
        assert_eq!(plan(42, 2, 6), PINNED);
    }

    const PINNED: [[usize; 2]; 6] = [[0, 1], [1, 0], [0, 1], [1, 0], [0, 1], [1, 0]];

    #[test]
    fn fewer_rounds_are_a_prefix_of_more() {
        let long = plan(7, 4, 40);
        for rounds in 0..40 {
            assert_eq!(plan(7, 4, rounds), long[..rounds as usize]);
        }
    }

    #[test]
    fn every_round_runs_each_subject_once() {
        for subjects in 1..8 {
            for round in plan(1, subjects, 30) {
                let mut sorted = round.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..subjects).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn blocks_balance_positions_and_succession() {
        for subjects in 2..8_usize {
            let length = if subjects % 2 == 0 { subjects } else { 2 * subjects };
            let plan = plan(5, subjects, 42)[..3 * length].to_vec();
            for block in plan.chunks(length) {
                for subject in 0..subjects {
                    for place in 0..subjects {
                        let times = block.iter().filter(|round| round[place] == subject).count();
                        assert_eq!(times, length / subjects, "subject {subject} at position {place}");
                    }
                    for other in (0..subjects).filter(|&other| other != subject) {
                        let times = block
                            .iter()
                            .flat_map(|r| r.windows(2))
                            .filter(|w| w == &[subject, other])
                            .count();
                        assert_eq!(times, length / subjects, "{other} after {subject}");
                    }
                }
            }
        }
    }

    #[test]
    fn neither_subject_leads_every_pair_of_rounds() {
        let firsts: Vec<usize> = plan(9, 2, 200).chunks(2).map(|pair| pair[0][0]).collect();
        let zeros = firsts.iter().filter(|&&first| first == 0).count();
        assert!((25..75).contains(&zeros), "{zeros} of 100 blocks begin with subject 0");
    }

    #[test]
    fn rounds_without_subjects_are_empty() {
        assert_eq!(plan(1, 0, 2), [Vec::<usize>::new(), Vec::new()]);
    }
}
