package agent

import (
	"errors"
	"fmt"
	"math"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/load"
)

// noBound is the capacity of a source that knows none.
const noBound = math.MaxUint32

// acceptPolicies and loadSources are the numbers of the data path.
var (
	acceptPolicies = map[config.AcceptPolicy]agentAcceptPolicy{
		config.AcceptAlways:  agentAcceptPolicyACCEPT_ALWAYS,
		config.AcceptNever:   agentAcceptPolicyACCEPT_NEVER,
		config.AcceptStatic:  agentAcceptPolicyACCEPT_STATIC,
		config.AcceptDynamic: agentAcceptPolicyACCEPT_DYNAMIC,
	}
	loadSources = map[config.LoadSource]agentLoadSource{
		config.LoadConnections:  agentLoadSourceLOAD_CONNECTIONS,
		config.LoadAcceptQueue:  agentLoadSourceLOAD_ACCEPT_QUEUE,
		config.LoadApache:       agentLoadSourceLOAD_REPORTED,
		config.LoadCgroup:       agentLoadSourceLOAD_REPORTED,
		config.LoadSharedMemory: agentLoadSourceLOAD_REPORTED,
	}
)

// newAcceptance is how a service takes connections, at first.
func newAcceptance(s config.AgentService) agentAcceptance {
	a := agentAcceptance{
		Policy:   uint8(acceptPolicies[s.Accept.Policy]),
		Source:   uint8(loadSources[s.Load.Kind]),
		Capacity: noBound,
	}
	switch s.Accept.Policy {
	case config.AcceptStatic:
		a.Initial = *s.Accept.Threshold
	case config.AcceptDynamic:
		a.Initial, a.Window = *s.Accept.Initial, s.Accept.Window
		a.Few, a.Many = bounds(s.Accept.Window, *s.Accept.Epsilon)
	}
	a.Threshold = a.Initial
	if s.Load.Kind == config.LoadConnections && s.Load.Workers != 0 {
		a.Capacity = s.Load.Workers
	}
	if interval := intervals[s.Load.Kind]; interval != 0 {
		a.StaleAfter = uint64(load.StaleAfter(interval))
	}
	if s.NotLocal == config.NotLocalReset {
		a.Reset = 1
	}
	return a
}

// bounds are the accepted connections of a window between which 6LB's algorithm 2 leaves the threshold
// alone: fewer than few are less than a share of 1/2-epsilon, more than many are more than 1/2+epsilon.
// In whole millionths, because 0.1 is no binary fraction and 20 of 50 must not be less than 0.4.
func bounds(window uint32, epsilon float64) (few, many uint32) {
	const one = 1_000_000
	e := uint64(math.Round(epsilon * one))
	few = uint32((uint64(window)*(one/2-e) + one - 1) / one)
	many = uint32(uint64(window) * (one/2 + e) / one)
	return few, many
}

// sameRule tells whether two acceptances differ only in what the data path made of them.
func sameRule(a, b agentAcceptance) bool {
	a.Lock, a.Threshold, a.Attempts, a.Accepted = b.Lock, b.Threshold, b.Attempts, b.Accepted
	return a == b
}

// writeAcceptances makes the data path follow the policies. A service whose policy stays keeps the
// threshold that it has come to.
func (k *kernel) writeAcceptances(want map[agentServiceKey]agentAcceptance) error {
	none := make([]agentOffers, ebpf.MustPossibleCPU())
	for key, a := range want {
		if err := addIfAbsent(k.objects.Offers, key, none); err != nil {
			return err
		}
		if err := addIfAbsent(k.objects.Connections, key, int64(0)); err != nil {
			return err
		}
		var now agentAcceptance
		err := k.objects.Acceptances.LookupWithFlags(key, &now, ebpf.LookupLock)
		if err == nil && sameRule(a, now) {
			continue
		}
		flags := ebpf.UpdateAny
		if err == nil {
			flags = ebpf.UpdateExist | ebpf.UpdateLock
		} else if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read %s: %w", k.objects.Acceptances, err)
		}
		if err := k.objects.Acceptances.Update(key, a, flags); err != nil {
			return fmt.Errorf("write to %s: %w", k.objects.Acceptances, err)
		}
	}
	// The connections of a service that is gone stay counted: they may outlast its absence.
	return errors.Join(
		datapath.Keep(k.objects.Acceptances, want),
		datapath.Keep(k.objects.Offers, want),
		datapath.Keep(k.objects.Loads, want),
	)
}

func addIfAbsent(m *ebpf.Map, key agentServiceKey, value any) error {
	if err := m.Update(key, value, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("write to %s: %w", m, err)
	}
	return nil
}
