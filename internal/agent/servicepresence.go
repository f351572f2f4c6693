// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"golang.org/x/sys/unix"
)

// Presence tells whether this host has what the packets of a service need: the VIP, and an
// application that listens.
type Presence struct {
	// VIPPresent tells whether the VIP is an address of the host. Outside the agent's network
	// namespace, it is the agent's last finding.
	VIPPresent bool `json:"vip_present"`
	// Listening tells whether an application listens on the VIP and the port. It is empty for
	// services of all ports, and outside the agent's network namespace.
	Listening Listening `json:"listening"`
	// Condition is what the answers to the probes of balancers say about the service.
	Condition Condition `json:"condition"`
}

// Listening tells whether an application listens.
type Listening string

// Where an application listens.
const (
	ListeningYes Listening = "yes"
	ListeningNo  Listening = "no"
	// ListeningElsewhere: no socket of the host listens, but the host has forwarded a SYN-ACK of
	// the service. So it forwards connections, for example to a container.
	ListeningElsewhere Listening = "elsewhere"
)

// Condition is the state of a service as balancers know it from the answers to probes.
type Condition string

// The conditions of a service, in the words of balancers.
const (
	ConditionUp        Condition = "up"
	ConditionNotServed Condition = "not-served" // the VIP is not an address of the host
	ConditionRefusing  Condition = "refusing"   // the application has stopped listening
)

// localVIPs caches whether VIPs are addresses of the host, while all services are read.
type localVIPs map[address]bool

// has tells whether the VIP of a service is an address of the host.
func (l localVIPs) has(key agentServiceKey) bool {
	vip := key.Vip.In6U.U6Addr8
	local, known := l[vip]
	if !known {
		local = isLocal(addressOf(key).Addr())
		l[vip] = local
	}
	return local
}

// presence finds out what the host has for a service. The condition is the one that the data path
// tells balancers, with an exception: a service that has refused a connection is up here as soon as
// it has a listening socket again.
func (v *View) presence(key agentServiceKey, local localVIPs) (p Presence, err error) {
	var present, listener uint32
	if _, err := find(v.maps.Vips, key.Vip.In6U.U6Addr8, &present); err != nil {
		return p, err
	}
	if _, err := find(v.maps.Listeners, key, &listener); err != nil {
		return p, err
	}
	p.VIPPresent = present != 0
	if v.here {
		p.VIPPresent = local.has(key)
	}
	if v.here && key.Port != 0 {
		if p.Listening, err = v.listening(key, agentListenerState(listener)); err != nil {
			return p, err
		}
	}
	p.Condition = ConditionUp
	switch {
	case present == 0:
		p.Condition = ConditionNotServed
	case agentListenerState(listener) == agentListenerStateLISTENER_REFUSED && p.Listening != ListeningYes:
		p.Condition = ConditionRefusing
	}
	return p, nil
}

// listening tells where an application of the service listens.
func (v *View) listening(key agentServiceKey, listener agentListenerState) (Listening, error) {
	_, listens, err := v.backlog(key)
	switch {
	case err != nil:
		return "", err
	case listens:
		return ListeningYes, nil
	case key.Protocol == unix.IPPROTO_TCP && listener == agentListenerStateLISTENER_ELSEWHERE:
		return ListeningElsewhere, nil
	}
	return ListeningNo, nil
}
