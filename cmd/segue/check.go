// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/plural"
)

// newCheck returns the command that validates a configuration file and touches nothing else.
func newCheck() *cobra.Command {
	var file, role string
	cmd := &cobra.Command{
		Use:   "check -c FILE",
		Short: "Validate a configuration file",
		Long: `Check reads a configuration file of a balancer or an agent and prints every
problem in it, one a line, as FILE:LINE: FIELD "VALUE": PROBLEM. It touches
nothing on the machine, so it may run anywhere and as any user.

Without --role, a file in which a service lists servers is a balancer's, and any
other an agent's; of one that is not YAML only that is said.

The exit code is 0 if the file is valid and 1 if it is not.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return check(cmd, file, role)
		},
	}
	configFlag(cmd, &file)
	cmd.Flags().StringVar(&role, "role", "", "`role` of the host that the file is for: lb or agent")
	return cmd
}

func check(cmd *cobra.Command, file, role string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	hint := ""
	if role == "" {
		role, hint, err = guessRole(data)
	}
	var kind, content string
	switch role {
	case "": // nobody's: err says why
	case "lb":
		kind = "balancer "
		var b *config.Balancer
		if b, err = config.ParseBalancer(data); err == nil {
			content = count(len(b.Services), "service") + ", " + count(servers(b), "server")
		}
	case "agent":
		kind = "agent "
		var a *config.Agent
		if a, err = config.ParseAgent(data); err == nil {
			content = count(len(a.Services), "service")
		}
	default:
		return fmt.Errorf("--role %q: must be lb or agent", role)
	}
	var problems config.Errors
	if errors.As(err, &problems) {
		fmt.Fprintln(cmd.OutOrStdout(), problems.In(file))
		return fmt.Errorf("%s: no valid %sconfiguration: %s%s", file, kind, count(len(problems), "problem"), hint)
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: valid %sconfiguration: %s\n", file, kind, content)
	return nil
}

// guessRole tells whose a file is, and why, for those who meant the other. One that is not YAML is
// nobody's.
func guessRole(data []byte) (role, hint string, err error) {
	isBalancer, err := config.HasServers(data)
	switch {
	case err != nil:
		return "", "", err
	case isBalancer:
		return "lb", " (a balancer's, for a service lists servers; --role agent if it is an agent's)", nil
	}
	return "agent", " (an agent's, for no service lists servers; --role lb if it is a balancer's)", nil
}

// servers counts a server once for each service that it is in.
func servers(b *config.Balancer) int {
	n := 0
	for _, s := range b.Services {
		n += len(s.Servers)
	}
	return n
}

func count(n int, noun string) string { return plural.Count(n, noun) }
