// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
)

// configFlag adds the required flag for the configuration file.
func configFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().VarP(&cli.FileFlag{Name: file}, "config", "c", "configuration `file`")
	refuse := cli.NoArguments("the file", "-c")
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if err := refuse(cmd, args); err != nil {
			return err
		}
		if *file == "" {
			return fmt.Errorf("%s: missing -c FILE", cli.CommandName(cmd))
		}
		return nil
	}
}

// keptFileFlag is configFlag for a process that reads the file at each reload. It refuses standard
// input.
func keptFileFlag(cmd *cobra.Command, file *string) {
	configFlag(cmd, file)
	valid := cmd.Args
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if err := valid(cmd, args); err != nil {
			return err
		}
		return refuseInput(cmd, *file)
	}
}

// refuseInput returns an error if the flag -c names standard input.
func refuseInput(cmd *cobra.Command, file string) error {
	if file != cli.StandardInput {
		return nil
	}
	return fmt.Errorf("%s: -c %s: must be a file, because the process reads it at each reload", cli.CommandName(cmd), file)
}

// parseEndpoint reads ADDRESS:PORT. It checks the address and the port one after the other, so that
// its error names the wrong one.
func parseEndpoint(text string) (netip.AddrPort, error) {
	colon := strings.LastIndexByte(text, ':')
	address := text[:max(colon, 0)]
	if _, err := netip.ParseAddrPort(address + ":1"); err != nil {
		return netip.AddrPort{}, errors.New("must be ADDRESS:PORT, with an IPv6 address in brackets")
	}
	if _, err := cli.ParsePort(text[colon+1:]); err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(text)
}
