//! Runs each model in every interleaving.
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
    gauge_never_exceeds_its_limit,
    a_refused_entry_does_not_cause_another_refusal,
    quotas_are_never_exceeded_and_always_fully_returned,
    user_at_the_limit_does_not_block_other_users,
    reused_port_is_open_only_for_its_new_owner,
    bucket_grants_each_byte_once,
    version_of_a_name_is_never_visible_before_its_answer,
    pool_grants_each_accrued_bit_once,
    unused_part_of_a_lease_returns_to_the_pool,
    shares_do_not_exceed_the_pool,
    worker_that_is_behind_does_not_lose_a_share,
    changing_a_limit_grants_no_more_than_the_larger_of_old_and_new,
    pool_in_use_is_not_removed,
    older_answer_does_not_bring_back_an_invalidated_user,
    choice_never_uses_an_answer_older_than_its_version,
    two_workers_apply_an_answer_and_both_see_its_addresses,
    connection_keeps_an_address_that_the_name_lost,
);
