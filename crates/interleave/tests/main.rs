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
    an_address_has_no_more_connections_than_it_may_and_loses_none,
    a_bucket_gives_each_byte_once_whoever_fills_it,
    the_version_of_a_name_is_never_ahead_of_its_answer,
);
