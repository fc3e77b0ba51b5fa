//! Each model, in every order of events.
#![forbid(unsafe_code)]

macro_rules! models {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                turnpike_interleave::$name();
            }
        )*
    };
}

models!(
    a_gauge_lets_in_no_more_than_its_limit,
    a_gauge_refuses_nobody_for_the_sake_of_somebody_who_was_refused,
    quotas_are_never_exceeded_and_given_back_whole,
    a_user_at_the_limit_takes_no_place_from_others,
    a_port_that_is_taken_again_has_nothing_open_but_what_its_owner_opens,
    a_bucket_gives_each_byte_once_whoever_fills_it,
    the_version_of_a_name_is_never_ahead_of_its_answer,
    a_pool_gives_what_it_gains_once_whoever_fills_it,
    what_a_worker_has_leased_and_not_given_out_is_the_pools_again,
    a_share_is_no_larger_than_what_all_who_ask_leave,
    a_worker_that_is_a_period_late_makes_no_share_vanish,
    a_pool_whose_limit_changes_gives_no_more_than_one_of_the_two,
    a_pool_that_somebody_has_taken_from_is_not_forgotten,
    who_is_forgotten_is_not_taken_from_an_older_answer,
    a_choice_is_made_of_an_answer_no_older_than_the_version,
    two_workers_take_an_answer_and_both_have_it,
    who_has_a_seat_at_an_address_keeps_it_though_the_name_has_lost_it,
);
