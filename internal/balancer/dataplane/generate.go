// SPDX-License-Identifier: Apache-2.0

package dataplane

//go:generate go tool bpf2go -target bpfel -type encapsulation -type placement -type bucket_hash -type persistence -type server_flags -type flow_state -type hint_use -type lb_reason -type report_result -type decision -type decided_segment -type decided_placement -type departure -type tables_version -type protocol_version -type probe_flag -type probe -type check -type service_entry_kind -type service_entry -type service_rule -type rule_flags -type feature -type vip_flags -type in6_addr -type directory -type service_line -type server -type report -type port -type quic_form -type estimator -type rank_run -type held_fragment balancer ../../../bpf/balancer/balancer.bpf.c -- -I../../../bpf
//go:generate go tool bpf2go -target bpfel dryrun ../../../bpf/balancer/balancer.bpf.c -- -I../../../bpf -DDRY_RUN
//go:generate go tool bpf2go -target bpfel -type sweep_run -type swept_server -type swept_table sweeper ../../../bpf/balancer/sweep.bpf.c -- -I../../../bpf
//go:generate go tool bpf2go -target bpfel -type copy_run copier ../../../bpf/balancer/copytable.bpf.c -- -I../../../bpf
