//! Delta debugging (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input"): removes the items of a list that are not
//! needed for a failure.

/// Returns the index of a list that fails, or `None`. The lists may be tried concurrently.
pub(super) type Fails<'a, T> = &'a mut dyn FnMut(&[Vec<T>]) -> Option<usize>;

/// Smallest failing list that was found in at most `rounds` rounds. If the rounds suffice, each item of the list is needed.
pub(super) fn reduce<T: Clone>(items: Vec<T>, rounds: usize, fails: Fails<'_, T>) -> Vec<T> {
    let mut items = items;
    let mut parts = 2;
    for _ in 0..rounds {
        if items.is_empty() {
            break;
        }
        parts = parts.min(items.len());
        let candidates: Vec<Vec<T>> = (0..parts).map(|part| without(&items, part, parts)).collect();
        match fails(&candidates) {
            Some(failing) => {
                items.clone_from(&candidates[failing]);
                parts = (parts - 1).max(2);
            }
            None if parts == items.len() => break,
            None => parts *= 2,
        }
    }
    items
}

fn without<T: Clone>(items: &[T], part: usize, parts: usize) -> Vec<T> {
    let bound = |part: usize| part * items.len() / parts;
    [&items[..bound(part)], &items[bound(part + 1)..]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced(items: Vec<u32>, rounds: usize, fails: impl Fn(&[u32]) -> bool) -> Vec<u32> {
        reduce(items, rounds, &mut |candidates| candidates.iter().position(|items| fails(items)))
    }

    #[test]
    fn only_necessary_items_remain_in_order() {
        let needs =
            |wanted: &'static [u32]| move |items: &[u32]| wanted.iter().all(|item| items.contains(item));
        assert_eq!(reduced((0..40).collect(), 1000, needs(&[3, 17, 39])), [3, 17, 39]);
        assert_eq!(reduced((0..40).collect(), 1000, needs(&[0])), [0]);
        assert_eq!(reduced((0..3).collect(), 1000, needs(&[0, 1, 2])), [0, 1, 2]);
        assert_eq!(reduced((0..9).collect(), 1000, |_| true), [0; 0]);
    }

    #[test]
    fn the_result_is_minimal_even_if_items_depend_on_each_other() {
        // Fails for an odd number of items that include 7.
        let fails = |items: &[u32]| items.len() % 2 == 1 && items.contains(&7);
        let left = reduced((0..21).collect(), 1000, fails);
        assert!(fails(&left) && left.len() < 6, "{left:?}");
        assert!((0..left.len()).all(|item| !fails(&without(&left, item, left.len()))), "{left:?}");
    }

    #[test]
    fn rounds_are_bounded() {
        let mut asked = 0;
        let left = reduce((0..64).collect::<Vec<u32>>(), 3, &mut |_| {
            asked += 1;
            None
        });
        assert_eq!((asked, left.len()), (3, 64));
    }
}
